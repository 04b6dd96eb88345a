"""Whatever a server's JSON holds: a run ends with its rows on disk, they are read back, and no number is spoiled."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from bench.raw_server import DONE, STREAM, chunk, event, raw_server
from ddtree.bench.numbers import cell_numbers
from ddtree.bench.plan import Load, Matrix, parse_variant
from ddtree.bench.result_folder import read_requests, read_sessions, read_units
from ddtree.bench.run import RunOptions, run_bench
from ddtree.bench.told import at, count, number, read_json, words
from ddtree.bench.workload import Problem, Workload

PROMPTS = Workload("w", "made here", (Problem("p", ("question",)),))
USAGE = b'{"prompt_tokens": 5, "completion_tokens": 2}'
HUGE = b"1" + b"0" * 400
DEEP = b"[" * 900 + b"]" * 900


def test_numbers_that_no_file_can_hold_are_none():
    told = read_json(b'{"a": NaN, "b": -Infinity, "c": 1e999, "d": %b, "e": %b}' % (HUGE, b"9" * 5000))
    assert told == dict.fromkeys("abcde")
    kept = [0, -1, 2**53, 2**63 - 1, -(2**63), 1e308, -0.5]
    assert read_json(json.dumps(kept).encode()) == kept
    assert read_json(b"[%d, %d]" % (2**63, -(2**63) - 1)) == [None, None]


def test_half_characters_are_replaced_and_whole_ones_are_not():
    assert read_json(b'{"\\ud800a": ["\\udc00", "\\uD83D\\uDE00", "\\ud7ff"]}') == {"�a": ["�", "\U0001f600", "\ud7ff"]}
    assert read_json(b'"\xed\xa0\x80x"') == "�x"
    assert read_json('"한국어"'.encode()) == "한국어"  # its bytes begin like those of a half


def test_how_deep_it_may_be():
    nested = "[" * 100 + "]" * 100
    assert read_json(nested.encode()) == json.loads(nested)
    assert len(read_json(b"[%b]" % b",".join([b"{}"] * 1000))) == 1000  # wide is not deep
    for deep in (b"[" * 101 + b"]" * 101, DEEP, b'{"a":' * 101 + b"1" + b"}" * 101, b"[" * 10**6):
        with pytest.raises(ValueError):
            read_json(deep)


@pytest.mark.parametrize("raw", [b"", b"{", b"{} {}", b"\xff", b'"\xff"', b"nul"])
def test_what_is_no_json(raw):
    with pytest.raises(ValueError):
        read_json(raw)


@pytest.mark.parametrize("value", [True, -1, 2**31, 1.0, "1", None, [1]])
def test_what_is_no_count(value):
    assert count(0) == 0 and count(2**31 - 1) == 2**31 - 1
    with pytest.raises(ValueError):
        count(value)


def test_a_number_and_what_is_held():
    assert number(3) == 3.0 and number(-0.5) == -0.5
    for value in (True, None, "1", float("nan"), float("-inf")):
        with pytest.raises(ValueError):
            number(value)
    assert at({"a": {"b": 1}}, "a", "b") == 1
    assert at({"a": [1]}, "a", "b") is at({}, "a") is at("a", "a") is None


def test_words():
    assert words("a\nkey\t\ud800", "key") == "a (the key) �" and words("a", None) == "a"
    assert words("x" * 498 + "secret", "secret") == "x" * 498 + "(t" and len(words("y" * 9000, None)) == 500


@contextmanager
def playing(last: bytes = b"{}", usage: bytes = USAGE, reason: bytes = b'"length"', text: str = "y", **paths: bytes):
    """A server whose stream ends with the event ``last`` and whose ``paths`` answer what they are given."""

    async def answering(head):
        path = head.split(b" ")[1].decode().rsplit("/", 1)[1]
        if path == "completions":
            yield STREAM + event("x")
            yield chunk(b"data: " + last + b"\n\n") + event(text)
            yield chunk(b'data: {"choices": [{"delta": {}, "finish_reason": %b}]}\n\n' % reason)
            yield chunk(b'data: {"choices": [], "usage": %b}\n\n' % usage) + DONE
        elif path == "models" or path in paths:
            body = paths.get(path, b'{"data": [{"id": "m"}]}')
            yield b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        else:
            yield b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\n{}"

    with raw_server(answering) as server:
        yield server


def measured(folder, server, variant="server", **load):
    """The only row, and the cell's numbers, as they are read back."""
    options = RunOptions(
        url=f"http://127.0.0.1:{server.port}",
        folder=folder,
        matrix=Matrix(workloads=(PROMPTS,), variants=(parse_variant(variant),)),
        load=Load(repetitions=1, requests=1, warm_up_requests=0, max_tokens=64, keep_text=True, **load),
    )
    run_bench(options)
    (row,), (cell,) = read_requests(folder), cell_numbers(read_units(folder), read_requests(folder))
    return row, cell


@pytest.mark.parametrize(
    "details",
    [b"[1]", b'"x"', b"7", b'{"cached_tokens": %b}' % HUGE, b'{"cached_tokens": 6}', b'{"cached_tokens": -4}'],
)
def test_cached_tokens_that_cannot_be_are_not_told(tmp_path, details):
    with playing(usage=USAGE[:-1] + b', "prompt_tokens_details": %b}' % details) as server:
        row, cell = measured(tmp_path, server)
    assert (row.error_kind, row.prompt_tokens, row.cached_tokens, cell.cached_share) == (None, 5, None, None)


def test_cached_tokens_that_can_be(tmp_path):
    with playing(usage=USAGE[:-1] + b', "prompt_tokens_details": {"cached_tokens": 4}}') as server:
        row, cell = measured(tmp_path, server)
    assert row.cached_tokens == 4 and cell.cached_share == 0.8


@pytest.mark.parametrize("tokens", [HUGE, b"1e999", b"NaN", b"3000000000", b"true", b"[5]"])
def test_prompt_tokens_that_cannot_be(tmp_path, tokens):
    with playing(usage=b'{"prompt_tokens": %b, "completion_tokens": 2}' % tokens) as server:
        assert measured(tmp_path, server)[0].error_kind == "usage_wrong"


@pytest.mark.parametrize(
    "account",
    [
        b'{"ddtree": {"accepted_lengths": [1e999], "mode": "tree", "budget": 8}}',
        b'{"ddtree": {"accepted_lengths": [%b], "mode": "tree", "budget": 8}}' % HUGE,
        b'{"ddtree": {"accepted_lengths": [-5, 6], "mode": "tree", "budget": 8}}',
        b'{"ddtree": {"accepted_lengths": [1], "mode": "tree", "budget": [1]}}',
        b'{"ddtree": {"accepted_lengths": [1], "mode": "tree", "budget": 1, "notes": 5}}',
        b'{"meta_info": {"spec_verify_ct": 1e999, "spec_accept_length": 2.0}}',
        b'{"meta_info": {"spec_verify_ct": 2, "spec_accept_length": NaN}}',
        b'{"meta_info": {"spec_verify_ct": 2, "spec_accept_length": 1e300}}',
        b'{"metrics": {"speculative_decoding": {"num_drafts": 1e999, "num_accepted_tokens": 1}}}',
        b'{"metrics": {"speculative_decoding": [1]}}',
    ],
)
def test_an_account_that_cannot_be_read_is_none(tmp_path, account):
    with playing(account) as server:
        row, cell = measured(tmp_path, server)
    assert (row.error_kind, row.completion_tokens) == (None, 2)
    assert (row.tau, row.rounds, row.accepted_lengths, row.ran_mode, row.ran_budget) == (None,) * 5
    assert cell.tau is None and cell.accepted == {}


def test_half_characters_are_stored_as_what_they_are(tmp_path):
    account = b'{"ddtree": {"accepted_lengths": [1], "mode": "tree", "budget": 8, "notes": ["\\ud800"]}}'
    info = b'{"internal_states": "\\ud800"}'
    with playing(
        account, reason=b'"\\ud800"', text="\\ud800", models=b'{"data": [{"id": "\\ud800"}]}', server_info=info
    ) as server:
        row, cell = measured(tmp_path, server)
    assert (row.error_kind, row.text, row.finish_reason, row.notes) == (None, "x�", "�", ["�"]) and cell.tau.value == 1
    assert read_sessions(tmp_path)[0].server_facts == {"/v1/models": ["�"], "/server_info": {"internal_states": "�"}}
    with playing(reason=b'"%b"' % (b"z" * 10**6)) as server:
        assert measured(tmp_path / "long", server)[0].finish_reason == "z" * 100
    with playing(b'{"error": {"message": "\\ud800 bad"}}') as server:
        row, _ = measured(tmp_path / "error", server)
    assert (row.error_kind, row.error_text) == ("error_event", "� bad")


@pytest.mark.parametrize(
    "deep", [b'{"choices": %b}', b'{"error": %b}', b'{"choices": [{"delta": {"tool_calls": %b}}]}']
)
def test_an_event_that_is_too_deep(tmp_path, deep):
    with playing(deep % DEEP) as server:
        assert measured(tmp_path, server)[0].error_kind == "broken_stream"


def test_facts_that_cannot_be_stored_are_left(tmp_path):
    with playing(server_info=b'{"internal_states": %b}' % DEEP) as server:
        assert measured(tmp_path, server)[0].error_kind is None
    assert read_sessions(tmp_path)[0].server_facts == {"/v1/models": ["m"]}


@pytest.mark.parametrize("told", [b'{"count": 1e999}', b'{"count": [1]}', b'{"count": %b}' % HUGE, b'{"count": "3"}'])
def test_a_tokenizer_that_tells_no_count(tmp_path, told):
    with playing(tokenize=told, version=b'{"version": "1"}') as server:
        assert measured(tmp_path, server)[0].error_kind is None


def test_counters_that_cannot_be_stored(tmp_path):
    counters = b"vllm:spec_decode_num_drafts_total 1e308\nvllm:generation_tokens_total 7\n"
    with playing(version=b'{"version": "1"}', metrics=counters) as server:
        measured(tmp_path, server)
    assert read_units(tmp_path)[0].metrics == {"completion_tokens": 0.0}
