"""The prompts that conversations are drawn from, and what can be made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree.errors import UserError
from ddtree.models.tokenizer import Tokenizer
from ddtree.train.data_facts import PromptFile, file_sha256
from ddtree.train.overlap import EvaluationText
from ddtree.train.prompt_files import BadRow, OnBadRow, PromptRow, read_prompt_file, refuse

FRAME_ROWS = 8
"""From so many rows on, what all prompts of a file begin and end with is taken for their form."""
_WORD = re.compile(r"\s*\S+")


@dataclass(frozen=True)
class PromptSource:
    """The usable prompts of one file.

    Attributes:
        prompts: token ids up to where the answer begins.
        subjects: the user's first turns without the file's form.
        beginning, ending: the form: what all turns of the file begin and end with, such as an instruction.
    """

    facts: PromptFile
    prompts: list[list[int]]
    subjects: list[str]
    beginning: str
    ending: str

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return Path(self.facts.name).stem


@dataclass(frozen=True)
class PromptPool:
    """All sources, and the rows that were left out.

    Attributes:
        n_evaluation: prompts left out because they share 13 words with an evaluation prompt.
    """

    sources: list[PromptSource]
    bad_rows: list[BadRow]
    n_evaluation: int


def read_pool(
    files: Sequence[tuple[Path, float]],
    tokenizer: Tokenizer,
    evaluation: EvaluationText,
    *,
    chat: bool,
    prompt_tokens: int,
    on_bad_row: OnBadRow,
) -> PromptPool:
    """Read prompt files, each with its weight.

    Args:
        chat: turns go through the model's chat template.
        prompt_tokens: a prompt of more is a bad row.

    Raises:
        UserError: a file without a usable prompt, two files of one name, or a bad row where none may be skipped.
    """
    sources: list[PromptSource] = []
    bad_rows: list[BadRow] = []
    n_evaluation = 0
    for file, weight in files:
        if any(Path(source.facts.name).stem == file.stem for source in sources):
            raise UserError(f"two prompt files are called {file.stem}", "rename one: the data tells sources by name")
        usable: list[EncodedRow] = []
        for row in read_prompt_file(file):
            found = encode_row(row, tokenizer, chat=chat, prompt_tokens=prompt_tokens)
            if isinstance(found, EncodedRow):
                if evaluation.shared(found.row.text):
                    n_evaluation += 1
                else:
                    usable.append(found)
            elif on_bad_row == "refuse":
                raise refuse(found)
            else:
                bad_rows.append(found)
        if not usable:
            why = next((str(bad) for bad in bad_rows if bad.file == file), "all are evaluation prompts")
            raise UserError(f"{file} has no usable prompt ({why})", "correct it, or leave it out")
        turns = [each.row.first_turn for each in usable]
        beginning, ending = common_frame(turns)
        subjects = [turn[len(beginning) : len(turn) - len(ending)] for turn in turns]
        facts = PromptFile(name=file.name, sha256=file_sha256(file), weight=weight, n_rows=len(usable))
        sources.append(PromptSource(facts, [each.tokens for each in usable], subjects, beginning, ending))
    return PromptPool(sources, bad_rows, n_evaluation)


def common_frame(turns: Sequence[str]) -> tuple[str, str]:
    """What all turns begin and end with, up to a whole word; empty where there are too few to tell."""
    if len(turns) < FRAME_ROWS:
        return "", ""
    beginning = _common_start(turns)
    ending = _common_start([turn[len(beginning) :][::-1] for turn in turns])[::-1]
    return beginning, ending


def _common_start(texts: Sequence[str]) -> str:
    """What all texts begin with, up to the last white space."""
    first, last = min(texts), max(texts)  # whatever these two share, those between them share
    pairs = zip(first, last, strict=False)
    n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))
    return first[: _last_gap(first[:n])]


def _last_gap(text: str) -> int:
    """Where the last white space ends; 0 without any."""
    return max((match.end() for match in re.finditer(r"\s", text)), default=0)


def opening_of(subject: str, words: int) -> str:
    """The first words of a text, never all of them, the white space between them kept."""
    parts = _WORD.findall(subject)
    return "".join(parts[: min(words, len(parts) - 1)])


def n_words(subject: str) -> int:
    """Words of a text as `opening_of` counts them."""
    return len(_WORD.findall(subject))


@dataclass(frozen=True)
class EncodedRow:
    """A usable row and its prompt's token ids."""

    row: PromptRow
    tokens: list[int]


def encode_row(row: PromptRow | BadRow, tokenizer: Tokenizer, *, chat: bool, prompt_tokens: int) -> EncodedRow | BadRow:
    """A row's prompt in token ids, up to where the answer begins; a row that cannot be used stays or becomes a bad one.

    Args:
        chat: through the model's chat template.
        prompt_tokens: a prompt of more is a bad row.
    """
    if isinstance(row, BadRow):
        return row
    if not chat and len(row.messages) > 1:
        return BadRow(row.file, row.row, "several messages, which raw text has no place for")
    try:
        tokens = tokenizer.encode_chat(row.messages) if chat else tokenizer.encode(row.first_turn)
    except UserError as error:
        return BadRow(row.file, row.row, str(error))
    if not tokens or len(tokens) > prompt_tokens:
        return BadRow(row.file, row.row, f"a prompt of {len(tokens)} tokens, at most {prompt_tokens} fit")
    return EncodedRow(row, tokens)
