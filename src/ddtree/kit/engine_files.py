"""What the engine's own interpreter is asked: its distributions, and the files of one that are not as installed.

The scripts run on the host with the interpreter that serves, so they use the standard library alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.deploy.host import Host

ANSWER_S = 600.0
_MARK = "ddtree-kit:"
_KEPT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "PATH")

_COMMON = r"""
import base64, csv, hashlib, json, os, platform, re, sys, sysconfig
from importlib.metadata import distributions
OWN = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD", "uv_cache.json", "uv_build.json", "WHEEL")
def digest_of(path):
    h = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            h.update(piece)
    return h.hexdigest()
def record_of(dist):
    # There are releases whose RECORD does not quote paths with commas: importlib.metadata cannot read them, and pip
    # cuts such lines when it installs, and adds the path once more without its hash.
    found = {}
    for row in csv.reader((dist.read_text("RECORD") or "").splitlines()):
        at = next((n for n, cell in enumerate(row) if cell.startswith("sha256=")), None)
        if at is not None:
            digest = row[at][7:]
            found[",".join(row[:at])] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
        elif row:
            found.setdefault(row[0], None)
    return found
def plain(name):
    return re.sub(r"[-_.]+", "-", name or "").lower()
def first_of_each():
    seen = {}
    for dist in distributions():
        name = plain(dist.metadata["Name"])
        if name and name not in seen:
            seen[name] = dist
    return seen
def origin_of(dist):
    text = dist.read_text("direct_url.json")
    if not text:
        return "index" if dist.read_text("INSTALLER") else "unknown"
    told = json.loads(text)
    if told.get("dir_info", {}).get("editable"):
        return "editable"
    return "local" if told.get("url", "").startswith("file:") else "url"
def tell(content):
    print("ddtree-kit:" + json.dumps(content))
"""
_PACKAGES = (
    _COMMON
    + r"""
found = []
for name, dist in sorted(first_of_each().items()):
    lines = []
    for path, value in record_of(dist).items():
        parts = path.split("/")
        if parts[0] != ".." and not path.endswith(".pyc") and parts[-1] not in OWN and value:
            lines.append("%s  %s" % (value, path))
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else None
    found.append({"name": name, "version": dist.version, "origin": origin_of(dist), "content_sha256": digest})
tell({"python": platform.python_version(), "implementation": platform.python_implementation(),
      "machine": platform.machine(), "site_packages": sysconfig.get_path("purelib"), "packages": found})
"""
)
_CHANGES = (
    _COMMON
    + r"""
wanted, most = plain(sys.argv[1]), int(sys.argv[2])
released = json.loads(sys.stdin.read())  # of the wheel's files, where it was had: path to SHA-256
dist = first_of_each().get(wanted)
if dist is None:
    tell({"found": False})
    sys.exit()
root = str(dist.locate_file(""))
record, tops = dict(released), set()
for path, value in record_of(dist).items():
    parts = path.split("/")
    if parts[0] == ".." or len(parts) < 2 or parts[0].endswith(".dist-info") or "__pycache__" in parts:
        continue
    tops.add(parts[0])
    if not released and value:
        record[path] = value
tops |= {path.split("/")[0] for path in released if "/" in path and ".dist-info/" not in path}
unhashed = set() if released else {path for path, value in record_of(dist).items() if value is None}
changes = []
def look(path, base):
    place = os.path.join(root, path)
    if not os.path.isfile(place):
        changes.append({"path": path, "change": "deleted", "base": base, "now": None, "content": None})
        return
    now = digest_of(place)
    if now != base:
        content = None
        if os.path.getsize(place) <= most:
            with open(place, "rb") as file:
                content = base64.b64encode(file.read()).decode()
        changes.append({"path": path, "change": "edited" if base else "added", "base": base, "now": now,
                        "content": content})
for path, base in sorted(record.items()):
    if path.split("/")[0] in tops:
        look(path, base)
for top in sorted(tops):
    for folder, names, files in os.walk(os.path.join(root, top)):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for name in sorted(files):
            path = os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")
            if path not in record and path not in unhashed and not name.endswith((".pyc", ".pyo")):
                look(path, None)
tell({"found": True, "version": dist.version, "origin": origin_of(dist), "root": root, "compared": len(record),
      "changes": changes})
"""
)


@dataclass(frozen=True)
class Interpreter:
    """The Python that serves, with the variables that decide what it imports."""

    host: Host
    program: str
    environment: Mapping[str, str]

    def ask(self, script: str, *arguments: str, stdin: str = "") -> dict[str, Any] | None:
        """What a script tells; None where it does not run."""
        told = self.host.run(
            'exec "$@"', *self.command(), "-c", script, *arguments, stdin=stdin.encode(), timeout_s=ANSWER_S
        )
        lines = [line for line in told.stdout.splitlines() if line.startswith(_MARK)]
        if told.exit_code or not lines:
            return None
        answer: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
        return answer

    def command(self) -> list[str]:
        """The words that start it."""
        kept = [f"{name}={value}" for name, value in self.environment.items() if name in _KEPT_VARIABLES]
        return ["env", *kept, self.program]

    def packages(self) -> dict[str, Any] | None:
        """Its distributions."""
        return self.ask(_PACKAGES)

    def changes(self, package: str, released: Mapping[str, str], most_bytes: int) -> dict[str, Any] | None:
        """Files of ``package`` that are not as released; by its RECORD where ``released`` is empty."""
        return self.ask(_CHANGES, package, str(most_bytes), stdin=json.dumps(dict(released)))

    def pip(self, *arguments: str, timeout_s: float = ANSWER_S) -> tuple[int, str, str]:
        """Exit code, output and complaints of its pip."""
        words = [*self.command(), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        told = self.host.run('exec "$@"', *words, timeout_s=timeout_s)
        return told.exit_code, told.stdout, told.stderr


def interpreter_of(
    host: Host, arguments: Sequence[str], environment: Mapping[str, str], venv: str | None
) -> Interpreter | None:
    """The interpreter of a running process, else of the virtual environment."""
    for place in (arguments[0] if arguments else "", f"{venv}/bin/python" if venv else ""):
        if place.startswith("/") and host.run('"$1" -c "import sys" 2>/dev/null', place).exit_code == 0:
            return Interpreter(host, place, environment)
        if place.startswith("/") and environment:
            kept = [f"{name}={value}" for name, value in environment.items() if name in _KEPT_VARIABLES]
            if host.run('env "$@" -c "import sys" 2>/dev/null', *kept, place).exit_code == 0:
                return Interpreter(host, place, environment)
    return None
