"""Grading servers whose JSON is odd: each answer is stored, read back, and judged or told as an error."""

from __future__ import annotations

import pytest

from bench.raw_server import raw_server
from ddtree.bench.grade.run import GradeOptions, read_grades, run_grade
from ddtree.bench.grade.sandbox import Limits, find_sandbox
from ddtree.bench.plan import parse_variant
from ddtree.bench.workload import Problem, Workload

SUM = Problem("sum", ("What is 2 + 2?",), {"answer": "4"})
USAGE = b'{"prompt_tokens": 3, "completion_tokens": 2}'
KEY = "sk-of-the-user"


def whole(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def answer_to(folder, told: bytes, info: bytes = b"{}"):
    """The stored answer of a server that tells ``told``; no program runs for a number, so no box is needed."""

    async def answering(head):
        if b"/v1/models " in head:
            yield whole(b"200 OK", b'{"data": [{"id": "m"}]}')
        elif b"/completions " in head:
            yield told
        else:
            yield whole(b"200 OK", info) if b"/server_info " in head else whole(b"404 No", b"{}")

    with raw_server(answering) as server:
        options = GradeOptions(
            sides=(("one", f"http://127.0.0.1:{server.port}", parse_variant("server")),),
            workload=Workload("w", "made here", (SUM,)),
            folder=folder,
            api_key=KEY,
        )
        (row,) = run_grade(options, find_sandbox(Limits(), is_unsafe=True)).answers
    assert read_grades(folder).answers == [row]
    return row


def answered(content=b'"#### 4"', logprobs=b"null", usage=USAGE, reason=b'"stop"'):
    choice = b'{"message": {"content": %b}, "finish_reason": %b, "logprobs": %b}' % (content, reason, logprobs)
    return whole(b"200 OK", b'{"choices": [%b], "usage": %b}' % (choice, usage))


def logprobs(token=b'"4"', own=b"-0.5", other=b"-1.5"):
    top = b'{"token": %b, "logprob": %b}, {"token": "5", "logprob": %b}' % (token, own, other)
    return b'{"content": [{"token": %b, "logprob": %b, "top_logprobs": [%b]}]}' % (token, own, top)


def test_an_answer_with_its_chances(tmp_path):
    row = answer_to(tmp_path, answered(logprobs=logprobs()))
    assert row.verdict == "passed" and row.chances[0].top == [("4", -0.5), ("5", -1.5)]


@pytest.mark.parametrize("own", [b"NaN", b"-1e999", b"null", b'"x"'])
def test_chances_that_are_no_numbers_are_not_told(tmp_path, own):
    row = answer_to(tmp_path, answered(logprobs=logprobs(own=own)))
    assert (row.verdict, row.chances) == ("passed", None)


@pytest.mark.parametrize("other", [b"NaN", b"-Infinity"])
def test_an_alternative_without_chance_is_none(tmp_path, other):
    row = answer_to(tmp_path, answered(logprobs=logprobs(other=other)))
    assert row.verdict == "passed" and row.chances[0].top == [("4", -0.5)]


def test_half_characters(tmp_path):
    row = answer_to(tmp_path, answered(b'"\\ud800 #### 4"', logprobs(token=b'"\\ud800"'), reason=b'"\\udfff"'))
    assert (row.verdict, row.text, row.finish_reason, row.chances[0].token) == ("passed", "� #### 4", "�", "�")


@pytest.mark.parametrize(
    "told",
    [
        answered(b"5"),
        answered(usage=b'{"completion_tokens": 1e999}'),
        answered(usage=b'{"completion_tokens": -1}'),
        whole(b"200 OK", b"[]"),
        whole(b"200 OK", b'{"choices": [[]]}'),
        whole(b"200 OK", b"[" * 10**5),
        whole(b"200 OK\r\ncontent-encoding: gzip", b"{}"),
        whole(b"500 No", b'{"error": {"message": "\\ud800 %b"}}' % KEY.encode()),
        whole(b"500 No", b'{"error": %b' % KEY.encode()),
    ],
)
def test_what_is_no_answer_is_an_error(tmp_path, told):
    row = answer_to(tmp_path, told)
    assert row.verdict == "error" and row.detail and KEY not in row.detail and row.text is None


@pytest.mark.parametrize("info", [b'{"effective": 1}', b'{"effective": {"engine": [1]}, "versions": ["ddtree"]}'])
def test_facts_of_another_shape(tmp_path, info):
    assert answer_to(tmp_path, answered(), info).verdict == "passed"
    assert read_grades(tmp_path).record.bound_nats == 0.5
