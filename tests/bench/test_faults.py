"""Numbers stay right whatever the server does, errors are counted by their kind, and nothing hangs."""

from __future__ import annotations

import time

import pytest

from bench.fault_server import Behaviour, seen, serving
from ddtree.bench.numbers import CellNumbers, cell_numbers
from ddtree.bench.padding import PadText
from ddtree.bench.plan import Load, Matrix, parse_variant
from ddtree.bench.result_folder import read_requests, read_sessions, read_units
from ddtree.bench.run import RunOptions, run_bench
from ddtree.bench.workload import Problem, Workload

PROMPTS = Workload("words", "made here", tuple(Problem(f"p{i}", (f"question number {i}",)) for i in range(7)))

server_saw: dict = {}


def measured(tmp_path, behaviour: Behaviour, variant="server", concurrency=2, **load) -> CellNumbers:
    settings = {
        "repetitions": 1,
        "requests": 10,
        "warm_up_requests": 0,
        "max_tokens": 64,
        "stall_timeout_s": 0.5,
    } | load
    with serving(behaviour) as url:
        server_saw.clear()
        options = RunOptions(
            url=url,
            folder=tmp_path,
            matrix=Matrix(workloads=(PROMPTS,), concurrencies=(concurrency,), variants=(parse_variant(variant),)),
            load=Load(**settings),
        )
        run_bench(options)
        server_saw.update(seen(url))
    (cell,) = cell_numbers(read_units(tmp_path), read_requests(tmp_path))
    return cell


def right(cell: CellNumbers, behaviour: Behaviour) -> None:
    """The speeds that the server was told to have, but for what a busy machine adds to sleeps."""
    assert behaviour.tok_s * 0.5 < cell.user_tok_s.value < behaviour.tok_s * 1.6
    assert behaviour.first_s * 1e3 < cell.ttft_ms.value < behaviour.first_s * 1e3 + 150 + 2 * cell.client_lag_ms
    good = cell.requests - sum(cell.errors.values())
    assert cell.completion_tokens == good * behaviour.tokens


def test_latency_and_chunks_of_several_tokens(tmp_path):
    behaviour = Behaviour(first_s=0.1, gap_s=0.01, tokens_per_chunk=5, is_native=True)
    cell = measured(tmp_path, behaviour, variant="tree:8", concurrency=3, requests=12)
    right(cell, behaviour)
    assert cell.errors == {}
    assert cell.tau.value == 5 and cell.tau_from == "answers" and cell.accepted == {5: 12 * 11}
    assert server_saw["most_at_once"] == 3
    expected = behaviour.tokens / (behaviour.first_s + 11 * behaviour.gap_s)  # of one slot that never pauses
    assert cell.total_is_steady and cell.total_tok_s.value < 3.3 * expected
    assert cell.total_tok_s.value > 0.5 * 3 * expected / (1 + cell.client_lag_ms / 50)  # of a machine that is free
    (unit,) = read_units(tmp_path)
    assert unit.metrics_tau == 5
    row = read_requests(tmp_path)[0]
    assert len(row.chunk_ms) == 12 and row.chunk_ms == sorted(row.chunk_ms)
    assert all(later - earlier > 5 for earlier, later in zip(row.chunk_ms, row.chunk_ms[1:], strict=False))


def test_ten_percent_errors(tmp_path):
    behaviour = Behaviour(fault_of=lambda number: "refused" if number % 10 == 3 else None)
    cell = measured(tmp_path, behaviour, requests=20)
    right(cell, behaviour)
    assert cell.errors == {"http_500": 2} and cell.error_share.value == 0.1
    assert cell.error_share.low < 0.1 < cell.error_share.high
    assert {row.error_text for row in read_requests(tmp_path) if row.error_kind} == {"out of luck"}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("broken", "broken_stream"),
        ("cut", "broken_stream"),
        ("garbage", "broken_stream"),
        ("no_reason", "broken_stream"),
        ("error_event", "error_event"),
        ("hang", "stalled"),
        ("drip", "stalled"),
        ("no_usage", "usage_missing"),
        ("absurd", "usage_wrong"),
        ("negative", "usage_wrong"),
        ("text", "usage_wrong"),
        ("far_too_few", "usage_wrong"),
    ],
)
def test_a_bad_answer_spoils_no_number(tmp_path, fault, kind):
    behaviour = Behaviour(fault_of=lambda number: fault if number in (2, 5) else None)
    began = time.monotonic()
    cell = measured(tmp_path, behaviour)
    assert time.monotonic() - began < 10
    assert cell.errors == {kind: 2} and cell.requests == 10
    right(cell, behaviour)
    assert all(row.completion_tokens is None for row in read_requests(tmp_path) if row.error_kind)


@pytest.mark.parametrize("fault", ["too_many", "too_few"])
def test_usage_that_only_the_tokenizer_can_refute(tmp_path, fault):
    """Twice and half the tokens are plausible by the stream alone: the server's own count of the text is held to it."""
    behaviour = Behaviour(
        fault_of=lambda number: fault if number in (2, 5) else None, is_native=True, tokens_per_chunk=2, chunks=20
    )
    cell = measured(tmp_path, behaviour, variant="server", max_tokens=500)
    assert cell.errors == {"usage_wrong": 2}
    right(cell, behaviour)


def test_a_silent_fallback_is_an_error(tmp_path):
    behaviour = Behaviour(fault_of=lambda number: "fell_back" if number == 4 else None, is_native=True)
    cell = measured(tmp_path, behaviour, variant="tree:8")
    assert cell.errors == {"not_as_asked": 1}


def test_all_of_it_at_once(tmp_path):
    faults = ["broken", "hang", "refused", "no_usage", "absurd"]
    behaviour = Behaviour(fault_of=lambda number: faults[number // 4 % 5] if number % 4 == 1 else None)
    cell = measured(tmp_path, behaviour, concurrency=4, requests=40)
    right(cell, behaviour)
    assert sum(cell.errors.values()) == 10 and len(cell.errors) == 5
    assert server_saw["answers"]["good"] == 30


def test_secrets_of_the_server_stay_there(tmp_path):
    measured(tmp_path, Behaviour(is_native=True), requests=2)
    (session,) = read_sessions(tmp_path)
    assert session.engine == "native" and "sk-secret" not in session.model_dump_json()


def test_conversations_go_on_from_the_replies(tmp_path):
    """Two turns are two requests, the second with the model's reply in it; a turn that fails ends the conversation."""
    turns = Workload("talk", "made here", (Problem("a", ("one", "two")), Problem("b", ("three", "four"))))
    behaviour = Behaviour(chunks=3, fault_of=lambda number: "refused" if number == 2 else None)
    with serving(behaviour) as url:
        load = Load(repetitions=1, requests=2, warm_up_requests=0, max_tokens=64)
        run_bench(RunOptions(url=url, folder=tmp_path, matrix=Matrix(workloads=(turns,)), load=load))
        bodies = seen(url)["bodies"]
    assert [len(body["messages"]) for body in bodies] == [1, 3, 1]
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert bodies[1]["messages"][1]["content"].split() == ["word"] * 7
    rows = read_requests(tmp_path)
    assert [(row.prompt_id, row.turn, row.error_kind) for row in rows] == [
        ("a", 0, None),
        ("a", 1, None),
        ("b", 0, "http_500"),
    ]


def test_what_a_request_asks_for(tmp_path):
    cell = measured(tmp_path, Behaviour(is_native=True), variant="tree:auto:4", requests=1, ignore_eos=True)
    (body,) = server_saw["bodies"]
    assert body["ddtree"] == {"mode": "tree", "budget": "auto", "top_k_cap": 4}
    assert body["ignore_eos"] is True and body["stream_options"] == {"include_usage": True}
    assert "seed" not in body and body["temperature"] == 0 and cell.errors == {}


def test_each_request_has_its_own_seed_and_every_variant_the_same(tmp_path):
    with serving(Behaviour(is_native=True)) as url:
        load = Load(repetitions=2, requests=2, warm_up_requests=0, max_tokens=64)
        variants = (parse_variant("ar"), parse_variant("tree:8"))
        matrix = Matrix(workloads=(PROMPTS,), temperatures=(0.7,), variants=variants)
        run_bench(RunOptions(url=url, folder=tmp_path, matrix=matrix, load=load))
        bodies = seen(url)["bodies"]
    asked = {mode: [body["seed"] for body in bodies if body["ddtree"]["mode"] == mode] for mode in ("ar", "tree")}
    assert sorted(asked["ar"]) == sorted(asked["tree"]) and len(set(asked["ar"])) == 4


def test_contexts_are_filled_by_the_servers_own_count(tmp_path):
    with serving(Behaviour(is_native=True)) as url:
        options = RunOptions(
            url=url,
            folder=tmp_path,
            matrix=Matrix(workloads=(PROMPTS,), contexts=(200,)),
            load=Load(repetitions=1, requests=2, warm_up_requests=0, max_tokens=64),
            pad_text=PadText("many words of text " * 500),
        )
        run_bench(options)
        bodies = seen(url)["bodies"]
    lengths = [len(body["messages"][0]["content"].split()) for body in bodies]
    assert lengths and all(192 <= length <= 200 for length in lengths)
