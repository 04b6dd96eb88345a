"""Prompts from flags and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree.cli.conversations import Conversation, read_conversations
from ddtree.errors import UserError


def write(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "p.jsonl").write_bytes(content)
    return tmp_path / "p.jsonl"


def test_turns_are_asked_in_order_with_the_answers_between() -> None:
    talk = Conversation(["one", "two"])
    assert talk.ask(0, chat=True) == [{"role": "user", "content": "one"}]
    talk.answer("1")
    assert talk.ask(1, chat=True) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]


def test_raw_text_is_passed_as_it_is() -> None:
    assert Conversation([" a"]).ask(0, chat=False) == " a"


def test_a_file_is_read_with_blank_lines_and_other_fields(tmp_path: Path) -> None:
    file = write(tmp_path, '{"id": 1, "turns": ["é"]}\n\n{"turns": ["b", "c"]}\n'.encode())
    assert [talk.turns for talk in read_conversations([], file, chat=True)] == [["é"], ["b", "c"]]


def test_line_separators_inside_json_do_not_split_a_line(tmp_path: Path) -> None:
    file = write(tmp_path, '{"turns": ["a\u2028b\u0085c"]}\n'.encode())
    assert read_conversations([], file, chat=True)[0].turns == ["a\u2028b\u0085c"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"turns": ["a"]}\n{"turns": ["b"\n', r"line 2 is not JSON"),
        (b'{"turns": "a"}', r"line 1 has no 'turns' list"),
        (b'{"turns": []}', "no 'turns' list"),
        (b'{"turns": [1]}', "no 'turns' list"),
        (b'{"turns": [""]}', "no 'turns' list"),
        (b'{"turn": ["a"]}', "no 'turns' list"),
        (b"[1]", "no 'turns' list"),
        (b"[" * 100_000, "nested too deeply|not JSON"),
        (b'{"turns": ["a"], "id": ' + b"9" * 6000 + b"}", r"line 1 is not JSON \(Exceeds the limit"),
        (b'{"turns": ["a"]}\n{"turns": ["\\ud800"]}', "line 2 is not valid Unicode text"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"", "holds no prompts"),
        (b"\n \n", "holds no prompts"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read_conversations([], write(tmp_path, content), chat=True)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="--prompt is not valid Unicode text"):
        read_conversations(["good", "\udcff"], None, chat=True)


def test_raw_text_has_no_place_for_several_turns(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 turns"):
        read_conversations([], write(tmp_path, b'{"turns": ["a", "b"]}'), chat=False)
