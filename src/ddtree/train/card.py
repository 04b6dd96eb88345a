"""The model card of a drafter, in the Hugging Face style: every number from what training and evaluation wrote."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddtree.errors import UserError
from ddtree.models.config_file import read_json_object
from ddtree.plain_text import printable
from ddtree.train.acceptance import ExpectedTau, read_expected_tau
from ddtree.train.card_facts import CardFacts, RunFacts, keep_card_facts, read_card_facts
from ddtree.train.data_facts import DataFacts, file_sha256
from ddtree.train.durable import replacing

CARD_FILE = "README.md"
_QWEN3_HEAD_DIM = 128
"""Of a config that names none."""


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write `README.md` into a drafter's folder, and the facts that it was made from.

    Args:
        folder: holds `config.json` and `model.safetensors`, and `expected_tau.json` where the drafter was evaluated.

    Raises:
        UserError: the facts belong to other weights, a file is damaged, or the disk cannot be written.
    """
    found = file_sha256(folder / "model.safetensors")
    if found != facts.weights_sha256:
        raise UserError(
            f"the facts are those of weights {facts.weights_sha256[:12]}, {folder} holds {found[:12]}",
            "export the drafter again",
        )
    text = card_text(facts, read_json_object(folder / "config.json"), _shape_of(folder), read_expected_tau(folder))
    keep_card_facts(folder, facts)
    with replacing(folder / CARD_FILE) as file:
        file.write(text.encode())


def rewrite_card(folder: Path) -> bool:
    """Write the card anew from the facts beside the drafter; returns False where there are none.

    Raises:
        UserError: as `write_card`.
    """
    facts = read_card_facts(folder)
    if facts is None:
        return False
    write_card(folder, facts)
    return True


def card_text(facts: CardFacts, config: dict[str, Any], weights: tuple[int, str], tau: ExpectedTau | None) -> str:
    """The card.

    Args:
        config: the drafter's `config.json`.
        weights: number of parameters, and their type.
        tau: what the evaluation found; None where there was none.
    """
    lines = [
        *_front_matter(facts),
        f"# {facts.name}",
        "",
        f"A DFlash block-diffusion drafter for **{facts.base_model or facts.target.name}**. In one forward pass it "
        f"proposes the next {_stated(config, 'block_size') - 1} tokens; the target verifies them, as a chain (DFlash) "
        "or as a tree (DDTree), and every token that is kept is the target's own.",
        "",
        *_shape_section(facts, config, weights),
        *_acceptance_section(tau),
        *_data_section(facts.data),
        *_training_section(facts),
    ]
    # Names and sentences come from other people's folders: none of them begins a line of its own.
    return "\n".join(printable(line, keep="") for line in lines)


def _front_matter(facts: CardFacts) -> list[str]:
    licence = [f"license: {facts.licence}"] if facts.licence else []
    base = [f"base_model: {facts.base_model}"] if facts.base_model else []
    tags = ["pipeline_tag: text-generation", "tags: [dflash, ddtree, speculative-decoding, draft-model]"]
    return ["---", *licence, *base, *tags, "---", ""]


def _shape_section(facts: CardFacts, config: dict[str, Any], weights: tuple[int, str]) -> list[str]:
    n_parameters, dtype = weights
    taps, block_size = _stated(config, "target_layer_ids"), _stated(config, "block_size")
    of_layers = f"layers {', '.join(map(str, taps))} (counted from 0)" if taps else "layers that are spread evenly"
    heads, temperature = config["num_attention_heads"], config["dflash_config"].get("draft_temperature")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    rows = {
        "format": "`DFlashDraftModel`, the Hugging Face layout of the z-lab drafters",
        "layers": f"{config['num_hidden_layers']}, hidden {config['hidden_size']}, intermediate "
        f"{config['intermediate_size']}, {heads} heads, {config.get('num_key_value_heads', heads)} "
        f"key/value heads, head size {config.get('head_dim', _QWEN3_HEAD_DIM)}",
        "attention": f"sliding, {window} tokens" if window else "full",
        "block size": f"{block_size} (one known token and {block_size - 1} mask tokens)",
        **({"draft temperature": f"{temperature:g}, for the trees of greedy requests"} if temperature else {}),
        "target features": f"output of target {of_layers}",
        "mask token": str(config["dflash_config"]["mask_token_id"]),
        "parameters": f"{n_parameters:,} in {dtype}; embedding and output head are the target's",
        "weights": f"SHA-256 `{facts.weights_sha256}`",
        "target": f"{facts.target.name}, `config.json` `{facts.target.config_sha256[:16]}`, vocabulary "
        f"{facts.target.vocab_size:,}",
        "licence": facts.licence or "none was stated",
    }
    return [*_table(("", ""), rows.items()), ""]


def _stated(config: dict[str, Any], key: str) -> Any:
    """A key that drafters have at either of two places; None where they have it at neither."""
    return config.get("dflash_config", {}).get(key, config.get(key))


def _acceptance_section(tau: ExpectedTau | None) -> list[str]:
    if tau is None:
        return ["## Acceptance", "", "Not measured yet: `ddtree train evaluate --keep` adds it.", ""]
    plans = list(dict.fromkeys(plan for row in tau.tau.values() for plan in row))
    rows = [
        (name, str(tau.n_prompts.get(name, "")), *(f"{row[plan]:.2f}" if plan in row else "" for plan in plans))
        for name, row in tau.tau.items()
    ]
    return [
        "## Acceptance",
        "",
        f"Tokens per round (tau) of a chain and of best-first draft trees with so many nodes: {tau.measured}.",
        "",
        *_table(("prompts", "number", *plans), rows),
        "",
    ]


def _data_section(data: Sequence[DataFacts]) -> list[str]:
    lines = ["## Training data", ""]
    for facts in data:
        asked = facts.asked
        total = facts.n_conversations
        lines += [
            f"{total:,} conversations of {facts.n_tokens:,} tokens, written by {facts.target.name} itself: "
            f"{facts.n_answer_tokens:,} answer tokens, {_share(facts.n_greedy, total)} of the conversations with "
            f"greedy answers, the rest at a temperature from {asked.temperature_low:g} to {asked.temperature_high:g}. "
            f"At most {asked.max_prompt_tokens} prompt and {asked.max_answer_tokens} answer tokens each; arithmetic in "
            f"{asked.dtype}; seed {asked.seed}.",
            "",
            *_table(
                ("prompts", "conversations", "share"),
                [(name, f"{count:,}", _share(count, total)) for name, count in facts.n_by_source.items()],
            ),
            "",
            *[
                f"* `{file.name}`: {file.n_rows:,} prompts, weight {file.weight:g}, SHA-256 `{file.sha256[:16]}`"
                for file in asked.prompts
            ],
            *_filter_lines(facts),
            "",
        ]
    return lines


def _filter_lines(facts: DataFacts) -> list[str]:
    lines = [f"* left out, {name}: {count:,} conversations" for name, count in facts.n_left_out.items()]
    if facts.n_cut:
        lines.append(f"* answers cut where they had begun to go round in circles: {facts.n_cut:,}")
    if facts.asked.excluded:
        names = ", ".join(f"`{file.name}` ({file.n_rows} prompts)" for file in facts.asked.excluded)
        allowed = "".join(f"; the sentence “{sentence}” does not count" for sentence in facts.asked.allowed)
        lines.append(
            f"* nothing shares 13 words in a row with {names}{allowed}; {facts.n_evaluation_prompts:,} given prompts "
            "were left out for that"
        )
    else:
        lines.append("* no evaluation prompts were excluded")
    return lines


def _training_section(facts: CardFacts) -> list[str]:
    run = facts.run
    return [
        "## Training",
        "",
        f"{run.steps:,} steps, {run.anchors:,} blocks, {run.seconds:,.0f} seconds on {run.device}. "
        f"Start: {run.start}. Versions: {', '.join(f'{name} {version}' for name, version in run.versions.items())}.",
        "",
        *_held_out_lines(run),
        *_table(("setting", "value"), [(name, _told(value)) for name, value in facts.settings.items()]),
        "",
    ]


def _held_out_lines(run: RunFacts) -> list[str]:
    lines = []
    if run.held_out_loss is not None:
        lines += [f"Loss on held-out conversations: {run.held_out_loss:.4f}.", ""]
    if run.held_out_hits:
        hits = " ".join(f"{hit:.2f}" for hit in run.held_out_hits)
        lines += [f"There, the likeliest token of each block position is the target's, depth 1 first: {hits}.", ""]
    return lines


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]


def _told(value: str | int | float | bool | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _shape_of(folder: Path) -> tuple[int, str]:
    """Number of parameters and their type, from the header of the weights (safetensors format)."""
    path = folder / "model.safetensors"
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"{path} is damaged ({error})", "export the drafter again") from None
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    names = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
    types = sorted({names.get(entry["dtype"], entry["dtype"]) for entry in tensors})
    return sum(math.prod(entry["shape"]) for entry in tensors), " and ".join(types)
