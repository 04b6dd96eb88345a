"""What a model card is made from: facts that data generation, training and evaluation wrote, never constants."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ddtree.errors import UserError
from ddtree.train.data_facts import Count, DataFacts, Record, Sha256, TargetIdentity
from ddtree.train.durable import replacing

FACTS_FILE = "training.json"


class RunFacts(Record):
    """What a training run did.

    Attributes:
        steps: optimizer steps.
        anchors: blocks that were trained on, all steps and processes together.
        seconds: spent in training steps.
        device: its name, and how many of them where there were several.
        start: what the weights began as, such as "normal(0, 0.02)" or the SHA-256 of an older drafter.
        versions: of ddtree, torch and what else decides.
        held_out_loss: at the end.
        held_out_hits: share of held-out block positions where the drafter's likeliest token is the target's, depth 1
            first.
    """

    steps: Count
    anchors: Count
    seconds: float
    device: str
    start: str
    versions: dict[str, str]
    held_out_loss: float | None = None
    held_out_hits: list[float] = Field(default_factory=list)


class CardFacts(Record):
    """All that the card of a drafter needs beside the drafter itself.

    Attributes:
        name: of the drafter.
        licence: SPDX identifier, in lower case as Hugging Face writes it; None where nobody chose one.
        base_model: the target's name on the Hugging Face hub, where it has one.
        weights_sha256: of the `model.safetensors` that these facts belong to.
        data: what it was trained on.
        settings: every hyperparameter by its name, as the run was told; names of files and folders, no paths.
    """

    schema_version: Literal["1"] = "1"
    name: str
    target: TargetIdentity
    licence: str | None = None
    base_model: str | None = None
    weights_sha256: Sha256
    data: list[DataFacts]
    settings: dict[str, str | int | float | bool | None]
    run: RunFacts


def keep_card_facts(folder: Path, facts: CardFacts) -> None:
    """Write the facts beside the drafter, from which its card can be written anew.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    with replacing(folder / FACTS_FILE) as file:
        file.write(facts.model_dump_json(indent=1).encode())


def read_card_facts(folder: Path) -> CardFacts | None:
    """The facts beside a drafter; None where there are none.

    Raises:
        UserError: they are damaged.
    """
    path = folder / FACTS_FILE
    try:
        return CardFacts.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})", "check the path") from error
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise UserError(
            f"{path} is damaged ({place}: {fault['msg']})", "remove it, or export the drafter again"
        ) from None
