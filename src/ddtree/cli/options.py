"""The options that verbs share, in groups, and what they become in the engine's words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from ddtree.cli.plain_numbers import plain_number
from ddtree.draft_temperature import COLDEST, HOTTEST
from ddtree.errors import UserError

if TYPE_CHECKING:
    from ddtree.engine import SamplingParams, Speculation


class Mode(StrEnum):
    """How tokens are decoded."""

    ar = "ar"
    chain = "chain"
    tree = "tree"


class Dtype(StrEnum):
    """The arithmetic of target and drafter."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


def draft_temperature_option(help: str) -> Any:
    """The option `--draft-temperature` of a verb, within its range."""
    return typer.Option(min=COLDEST, max=HOTTEST, help=help)


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Which target and drafter, where and how they run."""

    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Target: a Hugging Face folder. Without it, the demo's SmolLM2 and drafter."),
    ] = None
    draft: Annotated[Path | None, typer.Option(metavar="DIR", help="DFlash drafter trained for the target.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    dtype: Annotated[Dtype, typer.Option(help="Arithmetic of both models.")] = Dtype.auto
    block_size: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a drafted block, root included. Default: the drafter's.")
    ] = None
    draft_window: Annotated[
        int | None, typer.Option(min=1, help="Recent context tokens that the drafter attends to. Default: all.")
    ] = None
    draft_temperature: Annotated[
        float | None,
        draft_temperature_option("Below 1 trees grow deeper, above 1 broader; the text stays. Default: the drafter's."),
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest context in tokens. Default: the model's.")
    ] = None
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the memory free after loading that the caches may take.")
    ] = 0.8
    max_batch: Annotated[int, typer.Option(min=1, help="Prompts decoded at the same time.")] = 8
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: one a core; 1 is better on a busy machine.")
    ] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="One text in every mode and batch, to the last bit, in bfloat16 too. Slower; on a CPU drafts save "
            "nothing then.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How the target is helped along; none of this changes the text."""

    mode: Annotated[
        Mode | None, typer.Option(help="ar: one token a step. Default: tree with a drafter, ar without.")
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Nodes of a draft tree (1 to 1024), or length of a chain. Default for a tree: auto, which takes what "
            "promises most at each round.",
        ),
    ] = None
    top_k_cap: Annotated[
        int | None, typer.Option(metavar="K", help="Candidates a position of the tree. Default: min(budget, 64).")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the target chooses tokens."""

    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Longest answer, in tokens.")] = 256
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.0
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this total probability.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens.")] = None
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the top.")] = None
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0
    presence_penalty: Annotated[float, typer.Option(help="Lowers the logit of every token already written.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each time it was written.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Default: another one each time.")] = None
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
    ] = None


def chosen_mode(pair: PairOptions, speculation: SpeculationOptions) -> Mode:
    """The mode to decode in; refuses options that contradict it."""
    has_drafter = pair.draft is not None or pair.model is None
    mode = speculation.mode or (Mode.tree if has_drafter else Mode.ar)
    if mode is not Mode.ar:
        if not has_drafter:
            raise UserError(f"--mode {mode.value} needs a drafter", "add --draft DIR, or use --mode ar")
        if mode is Mode.chain:
            only_trees = {"--top-k-cap": speculation.top_k_cap, "--draft-temperature": pair.draft_temperature}
            for flag, given in only_trees.items():
                if given is not None:
                    raise UserError(f"{flag} does not apply to a chain", "leave it out, or use --mode tree")
        return mode
    for flag, value in {
        "--budget": speculation.budget,
        "--top-k-cap": speculation.top_k_cap,
        "--block-size": pair.block_size,
        "--draft-window": pair.draft_window,
        "--draft-temperature": pair.draft_temperature,
    }.items():
        if value is not None:
            remedy = "leave it out" if speculation.mode else "add --draft DIR"
            raise UserError(f"{flag} has no meaning in mode ar", f"{remedy}, or use --mode tree")
    return mode


def to_speculation(mode: Mode, options: SpeculationOptions) -> Speculation:
    """In the engine's words."""
    from ddtree import Speculation

    return Speculation(mode=mode.value, budget=parse_budget(options.budget, mode), top_k_cap=options.top_k_cap)


def parse_budget(text: str | None, mode: Mode) -> int | Literal["auto"] | None:
    """A budget as typed: a whole number or `auto`."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    number = whole_number(text)
    if number is None:
        auto = "auto or " if mode is Mode.tree else ""
        raise UserError(f"--budget is {text!r}", f"choose {auto}a whole number from 1 to 1024")
    return number


def whole_number(text: str) -> int | None:
    """The number that ``text`` writes in plain digits, where Python itself would take `8_0` and other scripts too."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def check_sampling(options: SamplingOptions) -> None:
    """Refuse filters that would do nothing, before any model is loaded."""
    if options.temperature == 0:
        for flag, value in {"--top-p": options.top_p, "--top-k": options.top_k, "--min-p": options.min_p}.items():
            if value is not None:
                raise UserError(f"{flag} has no effect at temperature 0", "add --temperature, or leave it out")


def to_sampling_params(options: SamplingOptions) -> SamplingParams:
    """In the engine's words; what is not given stays at the engine's default."""
    from ddtree import SamplingParams

    given = {field.name: getattr(options, field.name) for field in fields(options)}
    given["stop"] = tuple(options.stop or ())
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def with_option_groups(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Let typer see each field of the option groups in ``verb``'s signature as an option of its own."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(verb).parameters.values():
        if group := groups.get(parameter.name):
            field_hints = get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=plain_number(field_hints[field.name]),
                )
                for field in fields(group)
            ]
        else:
            hint = plain_number(hints[parameter.name])
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))

    @wraps(verb)
    def command(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return verb(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
