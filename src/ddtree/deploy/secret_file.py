"""Files of secrets: fetched where the deployment file says, written for the engine that reads them."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddtree.deploy.sections import Secret
from ddtree.errors import UserError

LARGEST_SECRET_BYTES = 1 << 16


@dataclass(frozen=True)
class SecretFile:
    """A file of mode 0600 on the host, made of secrets.

    Attributes:
        path: on the host; with the process supervisor below its folder.
        form: how the content is written: keys a line, an engine's YAML, or variables for systemd or a shell.
        sources: name to where the deploying machine finds it.
        api_key: the name among them that clients must show, if it is one of them.
    """

    path: str
    form: Literal["keys", "sglang_yaml", "systemd_environment", "shell_environment"]
    sources: Mapping[str, Secret]
    api_key: str | None = None

    def content(self) -> bytes:
        """Fetch the secrets.

        Raises:
            UserError: one is not to be had, or cannot be written in this form.
        """
        values = {name: fetch_secret(source, name) for name, source in self.sources.items()}
        if self.form == "sglang_yaml" and any(value.startswith("-") for value in values.values()):
            raise UserError("the secret api_key begins with '-', which sglang takes for a flag", "choose another key")
        key = values.get(self.api_key or "", "x")
        if not key.isascii() or " " in key or key.startswith("#"):  # HTTP cannot carry it; '#' begins a remark
            raise UserError(
                "the secret api_key is no key that clients can show", "write letters, digits and signs of ASCII alone"
            )
        return "".join(f"{self._line(name, value)}\n" for name, value in values.items()).encode()

    def key_in(self, content: bytes) -> str | None:
        """The key that clients must show, out of a file's content."""
        if self.api_key is None:
            return None
        start = self._line(self.api_key, "@").partition("@")[0].rstrip("\"' ")
        for line in content.decode().splitlines():
            if line.startswith(start):
                return self._value(line.removeprefix(start).strip())
        return None

    def _line(self, name: str, value: str) -> str:
        if self.form == "keys":
            return value
        if self.form == "sglang_yaml":
            return f"{name}: {json.dumps(value)}"  # a JSON string is a YAML string
        if self.form == "systemd_environment":  # in its double quotes, these alone are written with a backslash
            return f'{name}="' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'
        return f"export {name}={shlex.quote(value)}"

    def _value(self, written: str) -> str:
        if self.form == "sglang_yaml":
            return str(json.loads(written))
        if self.form == "systemd_environment":
            return re.sub(r"\\(.)", r"\1", written[1:-1])
        return shlex.split(written)[0] if self.form == "shell_environment" else written


def fetch_secret(source: Secret, name: str) -> str:
    """The secret from where the deployment file says, without the line's end.

    Raises:
        UserError: it is not there, empty, or more than one line.
    """
    if source.env is not None:
        value = os.environ.get(source.env, "")
        where = f"environment variable {source.env}"
        if not value:
            raise UserError(f"{where}, which holds the secret {name}, is not set", "set it, or name a file")
    else:
        path = Path(source.file or "")
        where = str(path)
        try:
            with path.open("rb") as file:
                raw = file.read(LARGEST_SECRET_BYTES + 1)
            value = raw.decode()
        except OSError as error:
            raise UserError(f"cannot read the secret {name} from {where} ({error.strerror})", "put it there") from None
        except UnicodeDecodeError:
            raise UserError(f"the secret {name} in {where} is not UTF-8 text", "write it on one line") from None
        if len(raw) > LARGEST_SECRET_BYTES:
            raise UserError(f"the secret {name} in {where} is larger than 64 KiB", "write it on one line")
    value = value.strip()
    if not value:
        raise UserError(f"the secret {name} in {where} is empty", "put it there")
    if any(not character.isprintable() for character in value):
        raise UserError(f"the secret {name} in {where} is not one line of text", "write it on one line")
    return value
