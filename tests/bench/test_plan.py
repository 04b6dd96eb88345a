"""Prompts, variants and order: what is typed is honoured or refused in one line."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from ddtree.bench.endpoint import clean_url
from ddtree.bench.grade.record import GRADE_FILES
from ddtree.bench.measure import problems_of
from ddtree.bench.padding import PadText, pad, read_pad_text
from ddtree.bench.plan import Load, Matrix, parse_variant, units_in_order
from ddtree.bench.record import BENCH_FILES, Variant, schema_text
from ddtree.bench.sse import EventReader, EventTooLong
from ddtree.bench.sweep.store import SWEEP_FILES
from ddtree.bench.workload import Problem, Workload, read_workload
from ddtree.errors import UserError

WORKLOAD = Workload("w", "made", tuple(Problem(f"p{i}", (f"question {i}",)) for i in range(5)))


@pytest.mark.parametrize("text", ["server", "ar", "chain", "chain:15", "tree", "tree:32", "tree:32:4", "tree:auto"])
def test_variants_go_there_and_back(text):
    assert parse_variant(text).name == text


def test_a_variant_becomes_fields_of_the_request():
    assert parse_variant("tree:auto:4").body() == {"ddtree": {"mode": "tree", "budget": "auto", "top_k_cap": 4}}
    assert parse_variant("tree:default:4").body() == {"ddtree": {"mode": "tree", "top_k_cap": 4}}
    assert Variant().body() == {}


@pytest.mark.parametrize(
    "text", ["", "trees", "ar:8", "tree:0", "tree:1025", "tree:8:4:2", "chain:auto", "tree:-1", "tree:８"]
)
def test_bad_variants(text):
    with pytest.raises(UserError, match="is no variant"):
        parse_variant(text)


def test_repetitions_hold_every_cell_once_in_changing_order():
    matrix = Matrix(workloads=(WORKLOAD,), concurrencies=(1, 2, 4), variants=(Variant(mode="ar"), Variant(mode="tree")))
    load = Load(repetitions=6)
    units = units_in_order(matrix.cells(), load)
    assert Counter(unit.name for unit in units) == Counter({unit.name: 1 for unit in units}) and len(units) == 36
    rounds = [tuple(unit.cell.name for unit in units[start : start + 6]) for start in range(0, 36, 6)]
    assert all(set(each) == set(rounds[0]) for each in rounds) and len(set(rounds)) > 3
    assert units == units_in_order(matrix.cells(), load) != units_in_order(matrix.cells(), Load(repetitions=6, seed=1))


def test_cells_of_a_repetition_share_prompts_and_repetitions_do_not():
    matrix = Matrix(workloads=(WORKLOAD,), variants=(Variant(mode="ar"), Variant(mode="tree")))
    load = Load(repetitions=2, requests=2)
    chosen = {
        unit.name: [p.id for p in problems_of(unit, load, WORKLOAD.problems)]
        for unit in units_in_order(matrix.cells(), load)
    }
    assert {tuple(ids) for name, ids in chosen.items() if name.endswith("r0")} == {("p0", "p1")}
    assert {tuple(ids) for name, ids in chosen.items() if name.endswith("r1")} == {("p2", "p3")}


def test_a_prefix_of_its_own():
    unit = units_in_order(Matrix(workloads=(WORKLOAD,)).cells(), Load())[0]
    chosen = problems_of(unit, Load(requests=5, unique_prefix=True), WORKLOAD.problems)
    assert len({p.turns[0].split("\n")[0] for p in chosen}) == 5
    assert all(p.turns[0].endswith(f"question {i}") for i, p in enumerate(chosen))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "holds no prompts"),
        ("{", "line 1 is not JSON"),
        ("[1]", "no 'turns'"),
        ('{"turns": []}', "no 'turns'"),
        ('{"turns": ["a", 1]}', "no 'turns'"),
        ('{"turns": ["\\ud800"]}', "not valid Unicode"),
        ('{"id": "a", "turns": ["x"]}\n{"id": "a", "turns": ["y"]}', "twice"),
        ('{"id": [], "turns": ["x"]}', "neither text nor a number"),
    ],
)
def test_bad_prompts(tmp_path, content, complaint):
    (tmp_path / "w.jsonl").write_text(content)
    with pytest.raises(UserError, match=complaint):
        read_workload(str(tmp_path / "w.jsonl"))


def test_prompts_from_elsewhere(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_workload(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=r"no set is known as hub:nope.*gsm8k"):
        read_workload("hub:nope")
    try:
        import datasets  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"ddtree\[hub\]"):
            read_workload("hub:gsm8k")
    (tmp_path / "w.jsonl").write_text("".join(json.dumps({"turns": [f"{i}\u2028"]}) + "\n" for i in range(4)))
    found = read_workload("mine=w.jsonl", tmp_path, limit=3)
    assert (found.name, len(found.problems), found.note) == ("mine", 3, "the first 3 of 4")


def words(text):
    async def count(asked):
        return len(asked.split()) + 7

    return asyncio.run(count(text))


@pytest.mark.parametrize("wanted", [64, 300, 1000])
def test_padding_reaches_the_length_from_below(wanted):
    asked = []

    async def count(text):
        asked.append(text)
        return len(text.split()) + 7

    text = PadText(" ".join(f"word{i}" for i in range(3000)))
    padded = [asyncio.run(pad(problem, i, wanted, text, count)) for i, problem in enumerate(WORKLOAD.problems)]
    for before, after in zip(WORKLOAD.problems, padded, strict=True):
        assert wanted - max(8, wanted // 50) <= words(after.turns[0]) <= wanted
        assert after.turns[0].endswith(before.turns[0])
    assert len({each.turns[0][:20] for each in padded}) == 5, "they share a prefix"
    assert len(asked) <= 9 * 5


def test_padding_that_cannot_be(tmp_path):
    async def count(text):
        return len(text.split())

    with pytest.raises(UserError, match="too little text"):
        asyncio.run(pad(WORKLOAD.problems[0], 0, 500, PadText("a few words"), count))
    long = Problem("long", ("word " * 100,))
    with pytest.raises(UserError, match="alone has 100 tokens"):
        asyncio.run(pad(long, 0, 50, PadText("a few words"), count))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no text"):
        read_pad_text(tmp_path / "empty")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_in_pieces_of_any_size(size):
    stream = b': ping\r\n\r\ndata: {"a": 1}\r\n\r\ndata:one\ndata: two\n\nevent: x\ndata: [DONE]\n\n'
    reader, found = EventReader(), []
    for start in range(0, len(stream), size):
        found += reader.feed(stream[start : start + size])
    assert found == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


def test_an_event_without_end():
    reader = EventReader()
    with pytest.raises(EventTooLong):
        for _ in range(20):
            reader.feed(b"x" * 2**20)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://u:p@host", "http://host/?key=1", "http://host:x"])
def test_bad_addresses(url):
    with pytest.raises(UserError):
        clean_url(url)


def test_addresses():
    assert clean_url("http://host:1/v1/") == clean_url("http://host:1") == "http://host:1"


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (BENCH_FILES, {"run.json", "sessions.jsonl", "requests.jsonl", "units.jsonl"}),
        (SWEEP_FILES, {"sweep.json", "points.jsonl"}),
        (GRADE_FILES, {"grade.json", "answers.jsonl", "comparisons.jsonl"}),
    ],
)
def test_schemas_name_every_file(files, names):
    schemas = json.loads(schema_text(files))["files"]
    assert set(schemas) == names
    assert all(schema["additionalProperties"] is False for schema in schemas.values())


def test_padding_finds_its_length_in_text_that_is_dense_in_places() -> None:
    """A table of numbers has a token for each character, prose one for five; a step between the two is steep."""
    prose, table = "word " * 400, "7" * 900
    text = PadText((prose + table) * 20)

    async def count(told: str) -> int:
        return told.count("7") + (len(told) - told.count("7")) // 5

    for index in range(40):
        for context in (512, 1024, 2048):
            found = asyncio.run(pad(Problem(str(index), ("why?",), {}), index, context, text, count))
            assert context - max(8, context // 50) <= asyncio.run(count(found.turns[0])) <= context
