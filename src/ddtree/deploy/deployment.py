"""A deployment file: one typed description of a service, read from TOML."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from ddtree.deploy.combinations import refuse_combinations
from ddtree.deploy.declaration import Declaration
from ddtree.deploy.section import Section
from ddtree.errors import UserError

LARGEST_FILE_BYTES = 1 << 20


class Deployment(Declaration):
    """Everything that decides how a model is served: engine, weights, speculation, service and host."""

    @model_validator(mode="after")
    def _combinations(self) -> Deployment:
        refuse_combinations(self)
        return self


def load_deployment(path: Path | str) -> Deployment:
    """Read and check a deployment file.

    Raises:
        UserError: the file cannot be read, is no TOML, or a key is wrong: the error names key and remedy.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE_BYTES + 1)
        if len(raw) > LARGEST_FILE_BYTES:
            raise UserError(f"{path} is larger than 1 MiB", "name a deployment file")
        text = raw.decode()
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror})", "name a deployment file, as examples/deployments"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text", "name a deployment file") from None
    return parse_deployment(text, folder=path.absolute().parent, told=str(path))


def parse_deployment(text: str, *, folder: Path | None = None, told: str = "deployment") -> Deployment:
    """Check the text of a deployment file.

    Args:
        folder: what relative paths of secrets and SSH keys start from; the working folder if left out.
        told: what errors call the file.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{told} is not TOML ({error})", "see https://toml.io") from None
    return to_deployment(data, folder=folder, told=told)


def to_deployment(data: dict[str, Any], *, folder: Path | None = None, told: str = "deployment") -> Deployment:
    """Check what a TOML parser gave, or what a sweep made of it; as :func:`parse_deployment`."""
    try:
        return Deployment.model_validate(data, context={"folder": folder or Path.cwd()})
    except ValidationError as error:
        faults: list[dict[str, Any]] = [dict(fault) for fault in error.errors(include_url=False)]
        faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")  # a misspelt key explains a missing one
        cause, remedy = _in_words(faults[0])
        others = {str(fault["loc"][:2]) for fault in faults} - {str(faults[0]["loc"][:2])}
        more = f" (and {len(others)} more)" if others else ""
        raise UserError(f"{told}: {cause}{more}", remedy) from None


def json_schema() -> dict[str, Any]:
    """JSON Schema of a deployment file."""
    schema = Deployment.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "ddtree deployment"}


def sections() -> dict[str, type[Section]]:
    """The tables of a file by name."""
    return {name: _section_of(field.annotation) for name, field in Deployment.model_fields.items()}


def _section_of(annotation: Any) -> type[Section]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(_section_of(part) for part in annotation.__args__ if part is not type(None))


def _in_words(fault: dict[str, Any]) -> tuple[str, str]:
    """Cause and remedy of one of pydantic's errors."""
    place: list[Any] = list(fault["loc"])
    model, field_help = _walk(place)
    key = _dotted(place)
    context = fault.get("ctx", {})
    if fault["type"] == "refused":
        return f"{key} {context['cause']}" if key else context["cause"], context["remedy"]
    if fault["type"] == "extra_forbidden":
        known = list(model.model_fields) if model else []
        close = difflib.get_close_matches(str(place[-1]), known, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        return f"unknown key {key}", f"{guess}known here: {', '.join(known)}"
    if fault["type"] == "missing":
        return f"{key} is missing", f"add it: {field_help}" if field_help else f"add [{key}]"
    if place[:1] == ["secrets"]:  # somebody wrote the secret itself: it is not repeated
        return f"{key} names no place of a secret", "write { file = ... } or { env = ... }"
    given = fault["input"]
    shown = repr(given) if isinstance(given, str | int | float | bool) else type(given).__name__
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return f"{key} is {shown[:80]}: {message}", field_help or "see docs/deploy.md"


def _walk(place: list[Any]) -> tuple[type[BaseModel] | None, str]:
    """The model that holds the last key of ``place``, and what the key's description says.

    Parts that pydantic adds for the branches of a union are taken out of ``place``.
    """
    model: type[BaseModel] | None = Deployment
    text, kept = "", []
    for depth, part in enumerate(place):
        field = model.model_fields.get(part) if model and isinstance(part, str) else None
        if field:
            text = " ".join((field.description or "").split())
            kept.append(part)
            if depth < len(place) - 1:
                try:
                    model = _section_of(field.annotation)
                except (AttributeError, StopIteration):
                    model = None
        elif model is not None or isinstance(part, int) or (kept and kept[-1] == "env"):
            kept.append(part)
    place[:] = kept
    return model, text


def _dotted(place: list[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
