"""What every section of a deployment file has in common: strict types, no unknown keys, errors with a remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

# Bidirectional marks too: a line would be read otherwise than it is taken.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Section(BaseModel):
    """A table of the file. Values are taken as they are written: no ``"8"`` for 8, no key that is not known."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def refuse(cause: str, remedy: str) -> NoReturn:
    """Refuse a value from within a validator, in words that :class:`ddtree.errors.UserError` will carry."""
    raise PydanticCustomError("refused", "{cause}", {"cause": cause, "remedy": remedy})


def _plain(value: str) -> str:
    if not value or value != value.strip():
        refuse(f"is {value!r}", "write it without blanks around it, and not empty")
    if _CONTROL.search(value):
        refuse(f"is {value!r}, which has a control character", "write plain text on one line")
    if value.endswith("\\"):
        refuse(f"is {value!r}, and units go on with the next line there", "end it otherwise than with a backslash")
    return value


def _host_path(value: str) -> str:
    if not value.startswith("/"):
        refuse(f"is {value!r}", "write the full path on the host, from /")
    if ".." in value.split("/"):
        refuse(f"is {value!r}", "write the path without '..'")
    return value.rstrip("/") or "/"


def _own_file(value: str, info: ValidationInfo) -> str:
    """Relative to the deployment file, for files of the machine that deploys."""
    folder = (info.context or {}).get("folder", Path.cwd())
    try:
        return str((folder / Path(value).expanduser()).absolute())
    except RuntimeError:
        refuse(f"is {value!r}, whose home folder is not known", "write the full path")


def matching(pattern: str, wanted: str) -> tuple[AfterValidator, Any]:
    """For ``Annotated``: take text that matches all of ``pattern``; ``wanted`` says it in words."""
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            refuse(f"is {value!r}", wanted)
        return value

    return AfterValidator(check), Field(json_schema_extra={"pattern": f"^(?:{pattern})$"})


Text = Annotated[str, AfterValidator(_plain)]
"""One line of text without control characters."""

HostPath = Annotated[Text, AfterValidator(_host_path)]
"""An absolute path on the host that is deployed to."""

OwnFile = Annotated[Text, AfterValidator(_own_file)]
"""A file on the machine that deploys; relative to the deployment file, ``~`` is the home folder."""

Texts = Annotated[tuple[Text, ...], Field(strict=False)]
HostPaths = Annotated[tuple[HostPath, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Field(ge=0.001, le=7 * 86400)]
EnvironmentName = Annotated[str, *matching(r"[A-Za-z_][A-Za-z0-9_]*", "use letters, digits and _ for its name")]


def without_duplicates(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse a list that names a thing twice."""
    twice = next((value for place, value in enumerate(values) if value in values[:place]), None)
    if twice is not None:
        refuse(f"has {twice!r} twice", "name it once")
    return values
