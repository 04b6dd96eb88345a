"""Which budget a server starts with: measured, probed, kept."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from ddtree.sglang import child_server, width_measure
from ddtree.sglang.budget_choice import BudgetChoice, choose_budget, command_line, widest_that_starts
from ddtree.sglang.child_server import ChildServer
from ddtree.sglang.settings import Asked, SettingsError, resolve
from ddtree.sglang.width_measure import TOKENS, measure_server
from ddtree.sglang.width_table import (
    DENSE_BUDGETS,
    MOE_BUDGETS,
    WidthRow,
    WidthTable,
    at,
    candidates,
    table_path,
    width_key,
)

SPEEDS = {8: {1: 700, 4: 2000, 16: 8000}, 16: {1: 900, 4: 2600, 16: 8100}, 32: {1: 1000, 4: 2650, 16: 6000}}


FIELDS, VERSIONS, SHAPE = {"model_path": "m", "tp_size": 1}, {"sglang": "0.5.16", "torch": "2.11"}, {"topk_cap": None}


@pytest.fixture
def table(tmp_path, monkeypatch) -> WidthTable:
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    return WidthTable(width_key(FIELDS, "GPU", VERSIONS, SHAPE))


def attempts(speeds, tried: list):
    def attempt(budget: int, timed: bool) -> WidthRow:
        tried.append((budget, timed))
        return WidthRow(budget in speeds, dict(speeds.get(budget, {})) if timed else {})

    return attempt


@pytest.mark.parametrize(("concurrency", "best"), [(1, 32), (2, 32), (4, 16), (9, 8), (100, 8)])
def test_auto_takes_the_fastest_for_the_concurrency_and_the_narrower_of_equals(table, concurrency, best) -> None:
    assert choose_budget(table, (8, 16, 32), concurrency, attempts(SPEEDS, [])) == best


@pytest.mark.parametrize("switch", ["fold_tail", "own_tables"])
def test_what_a_switch_slows_down_is_measured_apart(switch) -> None:
    def key(asked: Asked) -> dict:
        return BudgetChoice(SimpleNamespace(), SimpleNamespace(), asked, None)._table.key

    assert key(Asked(**{switch: False})) != key(Asked())
    resolved = resolve(Asked(budget=8, **{switch: False}), None, 16)
    assert resolved is not None and getattr(resolved, switch) is False


def test_measurements_are_taken_once_and_kept(table) -> None:
    tried: list = []
    choose_budget(table, (8, 16, 32, 64), 1, attempts(SPEEDS, tried))
    assert tried == [(b, True) for b in (8, 16, 32, 64)]
    again = WidthTable.load(table.key)
    assert again.rows == table.rows and not again.rows[64].starts
    assert choose_budget(again, (8, 16, 32, 64), 1, attempts({}, tried)) == 32
    assert len(tried) == 4


@pytest.mark.parametrize(
    "other",
    [
        (FIELDS, "another GPU", VERSIONS, SHAPE),
        (FIELDS, "GPU", VERSIONS | {"sglang": "0.5.17"}, SHAPE),
        (FIELDS, "GPU", VERSIONS | {"torch": "2.12"}, SHAPE),
        (FIELDS | {"model_path": "n"}, "GPU", VERSIONS, SHAPE),
        (FIELDS | {"speculative_draft_model_path": "d"}, "GPU", VERSIONS, SHAPE),
        (FIELDS | {"tp_size": 2}, "GPU", VERSIONS, SHAPE),
        (FIELDS | {"decode_attention_backend": "triton"}, "GPU", VERSIONS, SHAPE),
        (FIELDS, "GPU", VERSIONS, {"topk_cap": 4}),
    ],
)
def test_measurements_hold_for_their_device_models_versions_and_shape_only(table, other) -> None:
    table.rows[8] = WidthRow(True, {1: 5.0})
    table.save()
    assert WidthTable.load(width_key(FIELDS, "GPU", VERSIONS, SHAPE)).rows == table.rows
    assert WidthTable.load(width_key(*other)).rows == {}


def test_measurements_do_not_outlive_the_files_of_a_model(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    fields = FIELDS | {"model_path": str(tmp_path)}
    before = width_key(fields, "GPU", VERSIONS, SHAPE)
    assert width_key(fields, "GPU", VERSIONS, SHAPE) == before
    os.utime(weights, ns=(1, 1))
    assert width_key(fields, "GPU", VERSIONS, SHAPE) != before


def test_a_probe_is_not_a_measurement(table) -> None:
    tried: list = []
    assert widest_that_starts(table, 32, DENSE_BUDGETS, attempts(SPEEDS, tried)) == 32
    assert tried == [(32, False)]
    choose_budget(table, (32,), 1, attempts(SPEEDS, tried))
    assert tried[-1] == (32, True)


def test_where_capture_dies_the_widest_that_works_is_taken(table) -> None:
    tried: list = []
    only_8 = {8: SPEEDS[8]}
    assert widest_that_starts(table, 48, DENSE_BUDGETS, attempts(only_8, tried)) == 8
    assert [b for b, _ in tried] == [48, 32, 16, 8]
    assert widest_that_starts(WidthTable.load(table.key), 48, DENSE_BUDGETS, attempts({}, tried)) == 8
    assert len(tried) == 4


def test_none_works(table) -> None:
    assert widest_that_starts(table, 16, DENSE_BUDGETS, attempts({}, [])) is None
    with pytest.raises(SettingsError, match="no server came up"):
        choose_budget(table, (8, 16), 1, attempts({}, []))
    assert WidthTable.load(table.key).rows == {}, "the next start tries again"


def test_a_spoilt_table_counts_as_none(table) -> None:
    table.rows[8] = WidthRow(True, {1: 5.0})
    path = table.save()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    for text in ("{", "[]", '{"rows": {"8": {}}}', '{"rows": {"x": 1}}'):
        path.write_text(text)
        assert WidthTable.load(table.key).rows == {}
    assert table_path(table.key) == path


def test_the_nearest_measured_concurrency_counts() -> None:
    assert [at({1: 10, 4: 40, 16: 160}, c) for c in (1, 2, 3, 8, 9, 64)] == [10, 10, 40, 40, 160, 160]


def test_mixtures_of_experts_get_few_nodes() -> None:
    assert candidates(SimpleNamespace(n_routed_experts=384)) == MOE_BUDGETS
    assert candidates(SimpleNamespace(text_config=SimpleNamespace(num_experts=128))) == MOE_BUDGETS
    assert candidates(SimpleNamespace(num_local_experts=1)) == DENSE_BUDGETS


def test_only_a_server_started_by_flags_has_a_command_line(monkeypatch) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name="sglang.launch_server"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["x", "--model-path", "m"])
    assert command_line() == ["--model-path", "m"]
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None))
    monkeypatch.setattr(sys, "argv", ["/bin/sglang", "serve", "--model-path", "m"])
    assert command_line() == ["--model-path", "m"]
    monkeypatch.setattr(sys, "argv", ["program.py"])
    assert command_line() is None


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.01)
        body = json.dumps({"usage": {"completion_tokens": TOKENS}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None: ...


def test_speed_is_tokens_over_time_at_each_concurrency() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        told = measure_server(f"http://127.0.0.1:{server.server_port}", (1, 4))
    finally:
        server.shutdown()
        server.server_close()
    assert 500 < told[1] < TOKENS / 0.01
    assert told[4] > 1.3 * told[1]


def test_a_slow_moment_moves_no_speed_and_neither_does_a_fast_one(monkeypatch) -> None:
    """Two questions, 10 tokens each: the first takes 1 s but for once, the second 3 s but for once each way."""
    passes = iter([[(10, 1.0), (10, 3.0)], [(10, 9.0), (10, 3.0)], [(10, 1.0), (10, 3.0)], [(10, 1.0), (10, 0.1)],
                   [(10, 1.0), (10, 8.0)]])  # fmt: skip
    monkeypatch.setattr(width_measure, "_pass", lambda *_: next(passes))
    monkeypatch.setattr(width_measure, "_ask", lambda *_: (1, 1.0))
    assert measure_server("", (4,)) == {4: 4 * 20 / (1.0 + 3.0)}
    assert next(passes, None) is None, "as many passes for every width"


def test_a_child_that_dies_tells_why_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    """The child's command is real; this Python has no SGLang, so it dies at once."""
    monkeypatch.setattr(child_server.sys, "executable", sys.executable)
    with ChildServer(["--model-path", "m"], 8, {"topk_cap": 4}, tmp_path / "logs" / "child.log") as child:
        assert not child.comes_up(wait_s=60)
        assert "sglang" in child.last_words()
        process = child._process
    assert process.poll() is not None


def test_a_child_ends_with_the_process_that_started_it(tmp_path) -> None:
    code = (
        "import time; from ddtree.sglang.child_server import end_with_starter;"
        "end_with_starter(); print(1, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    environment = os.environ | {child_server.CHILD_VARIABLE: str(starter.pid)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        assert child.poll() is None
        starter.kill()
        starter.wait()
        assert child.wait(timeout=20) == 1
    finally:
        child.kill()
        child.communicate()
