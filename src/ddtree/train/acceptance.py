"""What a drafter is worth: acceptance lengths by set of prompts and by draft, greedy, through the real engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from ddtree.engine import Completion, Engine, SamplingParams, Speculation
from ddtree.errors import UserError
from ddtree.models.config_file import read_json_object
from ddtree.models.target_config import read_target_config
from ddtree.models.tokenizer import Tokenizer
from ddtree.train.data_facts import Count, Record, Sha256, TargetIdentity, file_sha256, identify_target
from ddtree.train.durable import replace_json, replacing
from ddtree.train.prompt_files import BadRow, OnBadRow, PromptRow, read_prompt_file, refuse
from ddtree.train.prompt_pool import EncodedRow, encode_row

EXPECTED_FILE = "expected_tau.json"
Plan = int | Literal["chain"]
"""A draft: a chain as long as the block allows, or a tree of so many nodes."""


class Acceptance(Record):
    """One draft on one set of prompts.

    Attributes:
        plan: `chain`, or the budget of a tree.
        rounds: of all answers together.
        tokens: that those rounds committed, bonus included; the last round of an answer as its end cut it.
        tau_per_prompt: mean of the prompts' own acceptance lengths.
    """

    data_set: str
    plan: Plan
    n_prompts: Count
    rounds: Count
    tokens: Count
    tau_per_prompt: float

    @property
    def tau(self) -> float:
        """Committed tokens per round; 0 where there was no round."""
        return self.tokens / self.rounds if self.rounds else 0.0


class Evaluation(Record):
    """Acceptance of a drafter, and how it was measured.

    Attributes:
        draft_temperature: at which trees were built.
        prompt_files: SHA-256 by name.
        bad_rows: rows that were passed over, each with its file, number and fault.
        notes: what the engine ran otherwise than asked.
    """

    schema_version: Literal["1"] = "1"
    drafter_sha256: Sha256
    target: TargetIdentity
    device: str
    dtype: str
    draft_temperature: float
    max_new_tokens: int
    prompt_files: dict[str, Sha256]
    bad_rows: list[str]
    notes: list[str]
    rows: list[Acceptance]
    seconds: float


class ExpectedTau(Record):
    """`expected_tau.json` beside a drafter: what its acceptance should be, for whoever checks a service that uses it.

    Attributes:
        drafter_sha256: of the `model.safetensors` that this belongs to.
        measured: how, in words.
        draft_temperature: at which trees were built.
        n_prompts: by set of prompts.
        tau: by set of prompts and by draft, `chain` or a budget.
    """

    drafter_sha256: Sha256
    measured: str
    draft_temperature: float = 1.0
    n_prompts: dict[str, Count] = Field(default_factory=dict)
    tau: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """An evaluation to make.

    Attributes:
        plans: drafts to try.
        count: the first so many prompts of each file; None for all.
        batch: prompts answered at a time.
        draft_temperature: at which trees are built; the drafter's own if None.
    """

    model: Path
    draft: Path
    prompts: tuple[Path, ...]
    plans: tuple[Plan, ...]
    max_new_tokens: int = 256
    count: int | None = None
    batch: int = 32
    device: str = "auto"
    dtype: str = "auto"
    on_bad_row: OnBadRow = "refuse"
    draft_temperature: float | None = None


def evaluate_drafter(request: EvaluationRequest, tell: Callable[[str, float], None]) -> Evaluation:
    """Answer the first turn of every prompt with every draft.

    Raises:
        UserError: something does not fit, is missing or damaged, or a prompt cannot be used and none may be skipped.
    """
    usable, bad_rows = _encoded(_read_sets(request), request)
    target, sha256 = identify_target(request.model), file_sha256(request.draft / "model.safetensors")
    speculations = {plan: _speculation(plan) for plan in dict.fromkeys(request.plans)}
    engine = Engine.load(
        request.model,
        request.draft,
        device=request.device,
        dtype=request.dtype,
        speculation=next(iter(speculations.values())),
        draft_temperature=request.draft_temperature,
        max_model_len=max(len(tokens) for prompts in usable.values() for tokens in prompts) + request.max_new_tokens,
        max_batch=request.batch,
        on_progress=tell,
    )
    rows: list[Acceptance] = []
    notes: list[str] = []
    began = time.perf_counter()
    params = SamplingParams(max_new_tokens=request.max_new_tokens)
    n_parts = len(usable) * len(speculations)
    for name, prompts in usable.items():
        for plan, speculation in speculations.items():
            tell(f"{name}, {_plan_name(plan)}", len(rows) / n_parts)
            completions = engine.generate(prompts, params, speculation=speculation)
            rows.append(_acceptance(name, plan, completions))
            notes += [note for completion in completions for note in completion.stats.notes]
    facts = engine.facts()
    return Evaluation(
        drafter_sha256=sha256,
        target=target,
        device=_device_name(facts),
        dtype=facts["dtype"],
        draft_temperature=facts["draft_temperature"],
        max_new_tokens=request.max_new_tokens,
        prompt_files={path.name: file_sha256(path) for path in request.prompts},
        bad_rows=[str(bad) for bad in bad_rows],
        notes=sorted(set(notes)),
        rows=rows,
        seconds=time.perf_counter() - began,
    )


def check_prompts(request: EvaluationRequest) -> None:
    """Refuse prompts that `evaluate_drafter` would refuse, long before it is called."""
    _encoded(_read_sets(request), request)


def keep_expected_tau(folder: Path, evaluation: Evaluation) -> ExpectedTau:
    """Write what was measured beside the drafter, in place of what stood there.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    tau: dict[str, dict[str, float]] = {}
    for row in evaluation.rows:
        tau.setdefault(row.data_set, {})[str(row.plan)] = round(row.tau, 6)
    expected = ExpectedTau(
        drafter_sha256=evaluation.drafter_sha256,
        measured=(
            f"{evaluation.dtype}, greedy, draft temperature {evaluation.draft_temperature:g}, at most "
            f"{evaluation.max_new_tokens} new tokens, first turn of each prompt; committed tokens per round"
        ),
        draft_temperature=evaluation.draft_temperature,
        n_prompts={row.data_set: row.n_prompts for row in evaluation.rows},
        tau=tau,
    )
    with replacing(folder / EXPECTED_FILE) as file:
        file.write(expected.model_dump_json(indent=1).encode() + b"\n")
    return expected


def keep_draft_temperature(folder: Path, draft_temperature: float) -> None:
    """Make it the drafter's own.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    config = read_json_object(folder / "config.json")
    config["dflash_config"] = config.get("dflash_config", {}) | {"draft_temperature": draft_temperature}
    replace_json(folder / "config.json", config)


def read_expected_tau(folder: Path) -> ExpectedTau | None:
    """What stands beside a drafter; None where nothing does, or where it belongs to other weights.

    Raises:
        UserError: it is damaged.
    """
    path = folder / EXPECTED_FILE
    try:
        expected = ExpectedTau.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})", "check the path") from error
    except ValidationError as error:
        raise UserError(f"{path} is damaged ({error.errors()[0]['msg']})", "evaluate the drafter again") from None
    return expected if expected.drafter_sha256 == file_sha256(folder / "model.safetensors") else None


def _speculation(plan: Plan) -> Speculation:
    return Speculation("chain") if plan == "chain" else Speculation("tree", budget=plan)


def _plan_name(plan: Plan) -> str:
    return "chain" if plan == "chain" else f"budget {plan}"


def _read_sets(request: EvaluationRequest) -> dict[str, list[PromptRow | BadRow]]:
    sets: dict[str, list[PromptRow | BadRow]] = {}
    for path in request.prompts:
        if path.stem in sets:
            raise UserError(f"two prompt files are called {path.stem}", "rename one: results are told by name")
        sets[path.stem] = list(read_prompt_file(path))[: request.count]
    return sets


def _encoded(
    sets: dict[str, list[PromptRow | BadRow]], request: EvaluationRequest
) -> tuple[dict[str, list[list[int]]], list[BadRow]]:
    """Token ids by set, and the rows that cannot be used."""
    config = read_target_config(request.model)
    tokenizer = Tokenizer(request.model, config.vocab_size)
    usable: dict[str, list[list[int]]] = {}
    bad_rows = []
    longest = config.max_positions - request.max_new_tokens  # so that every answer has room
    for name, rows in sets.items():
        usable[name] = []
        for row in rows:
            found = encode_row(row, tokenizer, chat=True, prompt_tokens=longest)
            if isinstance(found, EncodedRow):
                usable[name].append(found.tokens)
            elif request.on_bad_row == "refuse":
                raise refuse(found)
            else:
                bad_rows.append(found)
        if not usable[name]:
            raise UserError(f"{name} has no usable prompt", "correct the file, or leave it out")
    return usable, bad_rows


def _acceptance(data_set: str, plan: Plan, completions: Sequence[Completion]) -> Acceptance:
    stats = [completion.stats for completion in completions]
    own = [each.tau for each in stats if each.rounds]
    return Acceptance(
        data_set=data_set,
        plan=plan,
        n_prompts=len(stats),
        rounds=sum(each.rounds for each in stats),
        tokens=sum(sum(each.accepted_lengths) for each in stats),
        tau_per_prompt=sum(own) / len(own) if own else 0.0,
    )


def _device_name(facts: dict[str, Any]) -> str:
    import torch

    return torch.cuda.get_device_name() if str(facts["device"]).startswith("cuda") else str(facts["device"])
