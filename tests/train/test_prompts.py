"""Prompt files are read as they are meant, and a bad row is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree.errors import UserError
from ddtree.models.tokenizer import Tokenizer
from ddtree.train.overlap import EvaluationText
from ddtree.train.prompt_files import BadRow, PromptRow, read_prompt_file
from ddtree.train.prompt_pool import PromptPool, common_frame, opening_of, read_pool
from ddtree.train.turn_form import read_turn_form
from train.pieces import letters, tiny_target, write_prompts


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(tiny_target(tmp_path / "target"), 61)


def rows(path: Path, *lines: bytes | object) -> list[PromptRow | BadRow]:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines) + b"\n")
    return list(read_prompt_file(path))


def test_the_three_forms_of_a_row(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
    found = rows(
        tmp_path / "a.jsonl",
        {"turns": ["one", "two"], "prompt": "bare"},
        {"messages": [system, user, {"role": "assistant", "content": "old answer"}]},
        b"",
        {"prompt": "three"},
    )
    assert [row.row for row in found] == [1, 2, 4]
    told = [row.messages for row in found if isinstance(row, PromptRow)]
    assert told == [({"role": "user", "content": "one"},), (system, user), ({"role": "user", "content": "three"},)]
    assert isinstance(found[0], PromptRow) and found[0].text == "one\ntwo"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"turns": ["gr\xfc\xdfe"]}', "not UTF-8 (byte 15)"),
        (b'{"turns": ["a"', "not JSON ("),
        (b"[" * 100_000, "not JSON ("),
        (b'["a"]', "neither turns, messages nor prompt"),
        (b'{"turns": "a"}', "turns is no list of texts"),
        (b'{"turns": []}', "turns is no list of texts"),
        (b'{"turns": ["a", " "]}', "turns holds an empty text"),
        (b'{"prompt": "\\ud83d"}', "prompt holds half of a character"),
        (b'{"messages": [{"role": "user"}]}', "messages is no list of objects with role and content"),
        (b'{"messages": [{"role": "system", "content": "a"}]}', "messages has none of the user"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, tokenizer: Tokenizer, line: bytes, fault: str) -> None:
    path = tmp_path / "a.jsonl"
    _, bad = rows(path, {"turns": ["abc"]}, line)
    assert isinstance(bad, BadRow) and str(bad).startswith(f"a.jsonl, row 2: {fault}")
    pool = read(path, tokenizer, on_bad_row="skip")
    assert [str(b) for b in pool.bad_rows] == [str(bad)] and len(pool.sources[0].prompts) == 1
    with pytest.raises(UserError, match=r"a.jsonl, row 2: .*--on-bad-row skip"):
        read(path, tokenizer, on_bad_row="refuse")


def read(path: Path, tokenizer: Tokenizer, evaluation: tuple[str, ...] = (), **options: object) -> PromptPool:
    wanted: dict = {"chat": True, "prompt_tokens": 60, "on_bad_row": "refuse", **options}
    return read_pool([(path, 1.0)], tokenizer, EvaluationText(evaluation), **wanted)


def test_a_prompt_beyond_the_room_is_a_bad_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_prompts(tmp_path / "a.jsonl", ["abc", "d" * 58, "d" * 57])
    pool = read(path, tokenizer, on_bad_row="skip")
    assert [str(bad) for bad in pool.bad_rows] == ["a.jsonl, row 2: a prompt of 61 tokens, at most 60 fit"]
    assert pool.sources[0].prompts[0] == tokenizer.encode_chat([{"role": "user", "content": "abc"}])


def test_files_without_use_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(UserError, match=r"empty.jsonl is empty"):
        read(empty, tokenizer)
    with pytest.raises(UserError, match=r"cannot read .*missing.jsonl"):
        read(tmp_path / "missing.jsonl", tokenizer)
    seen = write_prompts(tmp_path / "seen.jsonl", [letters(1) + " " + letters(2) + " " + letters(3)])
    with pytest.raises(UserError, match=r"seen.jsonl has no usable prompt .all are evaluation prompts"):
        read(seen, tokenizer, evaluation=(letters(1) + " " + letters(2) + " " + letters(3),))
    with pytest.raises(UserError, match="two prompt files are called seen"):
        read_pool(
            [(seen, 1.0), (seen, 2.0)], tokenizer, EvaluationText([]), chat=True, prompt_tokens=60, on_bad_row="skip"
        )


def test_a_form_is_what_all_prompts_of_a_file_share() -> None:
    asked = [f"Solve this: {letters(i)}\nThink first, then answer." for i in range(8)]
    assert common_frame(asked) == ("Solve this: ", "\nThink first, then answer.")
    assert common_frame(asked[:7]) == ("", "")
    assert common_frame([letters(i) for i in range(9)]) == ("", "")
    assert common_frame(["word"] * 9) == ("", "")  # whole words only, so that something is left to say


def test_an_opening_is_never_the_whole() -> None:
    assert opening_of("How many\n  apples are left?", 3) == "How many\n  apples"
    assert opening_of("How many", 24) == "How"
    assert opening_of("Hello", 24) == "" == opening_of("a b", 0)


def test_the_form_of_a_turn_is_the_templates_own(tokenizer: Tokenizer) -> None:
    form = read_turn_form(tokenizer, chat=True)
    whole = tokenizer.encode_chat([{"role": "user", "content": "ab cd ef"}])
    assert form.begin(["ab", ""])[0] + tokenizer.encode_rendered([" cd"])[0] + form.end(" ef") == whole
    assert form.begin([""]) == [[1]]


def test_a_template_that_rewrites_turns_cannot_be_completed(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "other")
    path = folder / "chat_template.jinja"
    path.write_text("{% for m in messages %}<s>{{ m['content'] | upper }}</s>{% endfor %}<s>")
    with pytest.raises(UserError, match=r"rewrites what the user says.*--self-prompt-share 0"):
        read_turn_form(Tokenizer(folder, 61), chat=True)
