"""Answers under a grammar: of the form asked for, and the same as by plain decoding."""

from __future__ import annotations

import json
import re
from typing import Any

from near_ties import MOST_STEPS, STEP, partings
from servers import Server

REGEX = r"(yes|no), because [a-z ,]{20,80}\."
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 60}, "steps": {"type": "integer"}, "sure": {"type": "boolean"},
    },
    "required": ["answer", "steps", "sure"],
}  # fmt: skip
FORMS: dict[str, dict[str, str]] = {"regex": {"regex": REGEX}, "json": {"json_schema": json.dumps(SCHEMA)}}


def is_of_form(form: str, text: str) -> bool:
    if form == "regex":
        return re.fullmatch(REGEX, text) is not None
    try:
        return set(json.loads(text)) == set(SCHEMA["required"])
    except ValueError:
        return False


def check_grammar(plain: Server, tree: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """Greedy, four at a time, and one plain request among them so that batches are mixed.

    Two allowed tokens part them at most by a near-tie: both were free to take either.
    """
    found: dict[str, Any] = {"answers": 0, "misshapen": 0, "equal": 0, "near_ties": 0, "faults": 0}
    some = prompts[:12]
    for form, asked in FORMS.items():
        want, _ = plain.answer_all(some, 1, max_new_tokens=200, **asked)
        got, _ = tree.answer_all(some, 4, max_new_tokens=200, **asked)
        whole = [answer for answer in got if answer.meta["finish_reason"]["type"] == "stop"]
        found["answers"] += len(got)
        found["misshapen"] += sum(not is_of_form(form, answer.text) for answer in whole)
        places, parted = partings(plain, some, got, want)
        found["equal"] += sum(place is None for place in places)
        near = sum(abs(parting.gap - parting.other_gap) <= MOST_STEPS * STEP for parting in parted)
        found["near_ties"] += near
        found["faults"] += len(parted) - near
        found[f"{form}_first_answer"] = got[0].text[:120]
        found[f"{form}_ended"] = len(whole)
        rounds = sum(int(answer.meta.get("spec_verify_ct") or 0) for answer in got)
        found[f"{form}_tau"] = round(sum(len(answer.token_ids) for answer in got) / max(rounds, 1), 2)
    return found
