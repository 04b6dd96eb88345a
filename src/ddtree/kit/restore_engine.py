"""The engine of a kit on a host: its environment from the lock, and its patches on the very base they were made for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddtree.deploy.host import Host
from ddtree.errors import UserError
from ddtree.kit.bag import digest_of
from ddtree.kit.engine_files import Interpreter
from ddtree.kit.record import EnvironmentRecord, Package, PatchedFile, PatchRecord

BUILD_S = 3 * 3600.0
_MARK = ".ddtree-kit-unfinished"
_INSTALLERS = {"pip", "setuptools", "wheel"}
_LEFT_OF_A_WRITE = re.compile(r".+\.new\.[0-9]+")
"""What a host keeps beside a file while it writes it, and a power cut leaves there."""
# A venv without the mark is somebody's; one with it is ours, and half made.
_IS_THERE = '[ -e "$1" ] && [ ! -e "$1/' + _MARK + '" ]'
_BEGIN = """
set -eu
rm -rf -- "$1"
mkdir -p -- "$1"
: >"$1/.ddtree-kit-unfinished"
"$2" -m venv -- "$1"
"""
_INSTALL = """
set -eu
exec "$1/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --no-deps --require-hashes \
    --only-binary :all: --find-links "$1/.wheels" -r "$1/requirements.lock"
"""
_END = 'rm -rf -- "$1/.wheels" && sync && rm -f -- "$1/' + _MARK + '"'
_PYTHON = """
for each in "python$1" python3 python; do
    if "$each" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
        command -v "$each"
        exit 0
    fi
done
exit 1
"""


@dataclass
class EnginePlan:
    """What is to be done for environment and patches.

    Attributes:
        build: the virtual environment is to be made.
        different: packages that are not as sealed, in words.
        to_patch: files to be changed; ``patched``: those that are as sealed already.
        left_over: of writes that were broken off, to be removed.
        refused: why this cannot be done.
        unknown: what cannot be looked at.
    """

    build: bool = False
    python: str | None = None
    different: list[str] = field(default_factory=list)
    to_patch: list[PatchedFile] = field(default_factory=list)
    patched: int = 0
    left_over: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def plan_build(
    host: Host, venv: str, sealed: EnvironmentRecord | None, wheels: Sequence[Path], plan: EnginePlan
) -> None:
    """Whether the virtual environment must be made, and could be."""
    if host.run(_IS_THERE, venv, privileged=True).exit_code == 0:
        return
    plan.build = True
    if sealed is None:
        plan.refused.append("the kit does not know the engine's packages: make the environment yourself")
        return
    minor = ".".join(sealed.python.split(".")[:2])
    found = host.run(_PYTHON, minor, privileged=True)
    if found.exit_code:
        plan.refused.append(f"there is no Python {minor} on {host.name}: install it")
    plan.python = found.stdout.strip() or None
    brought = {_identity(wheel) for wheel in wheels}
    lacking = [each for each in _needed(sealed) if not each.wheel_sha256 and (each.name, each.version) not in brought]
    if lacking:
        names = ", ".join(f"{each.name}=={each.version}" for each in lacking[:8])
        plan.refused.append(f"the lock has no hash for {names}: give their wheels with --wheels DIR")


def build(host: Host, venv: str, sealed: EnvironmentRecord, wheels: Sequence[Path], python: str) -> None:
    """Make the environment from the lock; a half-made one of an earlier attempt is made anew.

    Raises:
        UserError: pip refuses: a hash is another one, or a wheel is not to be had.
    """
    told = host.run(_BEGIN, venv, python, privileged=True, timeout_s=600)
    if told.exit_code:
        raise UserError(
            f"cannot make {venv} on {host.name} ({told.trouble})", "check python3-venv and the rights there"
        )
    brought = {_identity(wheel): wheel for wheel in wheels}
    lines = []
    for each in _needed(sealed):
        wheel = brought.get((each.name, each.version))
        if wheel is not None:
            host.write(f"{venv}/.wheels/{wheel.name}", wheel.read_bytes(), privileged=True)
        digest = digest_of(wheel) if wheel is not None else each.wheel_sha256
        lines.append(f"{each.name}=={each.version} --hash=sha256:{digest}\n")
    host.write(f"{venv}/requirements.lock", "".join(lines).encode(), privileged=True)
    host.run('mkdir -p -- "$1/.wheels"', venv, privileged=True)
    told = host.run(_INSTALL, venv, privileged=True, timeout_s=BUILD_S)
    if told.exit_code:
        raise UserError(f"pip did not install the lock on {host.name} ({told.trouble})", "run restore again")
    host.run(_END, venv, privileged=True)


def compare_packages(interpreter: Interpreter, sealed: EnvironmentRecord) -> list[str]:
    """Packages that are not as sealed; what is there beside them does not matter."""
    told = interpreter.packages()
    if told is None:
        return ["its interpreter does not tell its packages"]
    found = {each["name"]: Package(**each) for each in told["packages"]}
    different = []
    for each in _needed(sealed):
        other = found.get(each.name)
        if other is None:
            different.append(f"{each.name} {each.version} is missing")
        elif other.version != each.version:
            different.append(f"{each.name} is {other.version}, sealed was {each.version}")
        elif each.content_sha256 and other.content_sha256 != each.content_sha256:
            different.append(f"{each.name} {each.version} is of another build")
    return different


def plan_patches(interpreter: Interpreter, patches: PatchRecord, plan: EnginePlan) -> str | None:
    """Compare each file with its base and with what was sealed; returns where the package lies."""
    if patches.package is None or patches.base == "none":
        return None
    told = interpreter.changes(patches.package, {}, 0)
    if told is None or not told["found"]:
        plan.refused.append(f"{patches.package} is not installed there: the patches have no base")
        return None
    if told["version"] != patches.version:
        plan.refused.append(f"{patches.package} is {told['version']}, the patches are for {patches.version}")
        return None
    now = {each["path"]: each for each in told["changes"]}
    for each in patches.files:
        seen = now.pop(each.path, None)
        current = seen["now"] if seen else each.base_sha256
        if current == each.sealed_sha256:
            plan.patched += 1
        elif current != each.base_sha256:
            plan.refused.append(f"{each.path} is neither as released nor as sealed: the patch has another base")
        elif each.is_masked:
            plan.refused.append(f"{each.path} had a secret in it, which the kit does not have: patch it by hand")
        else:
            plan.to_patch.append(each)
    plan.left_over = sorted(
        path for path, seen in now.items() if seen["base"] is None and _LEFT_OF_A_WRITE.fullmatch(path)
    )
    others = sorted(now.keys() - set(plan.left_over))
    plan.refused += [f"{path} was changed there, and not in the kit: the base differs" for path in others]
    return str(told["root"])


def apply_patches(host: Host, root: str, folder: Path, files: Sequence[PatchedFile]) -> None:
    """Put the sealed files in place, one at a time and each at once.

    Raises:
        UserError: a file is not in the kit, or cannot be written.
    """
    for each in files:
        place = f"{root}/{each.path}"
        if each.change == "deleted":
            told = host.run('rm -f -- "$1"', place, privileged=True)
            if told.exit_code:
                raise UserError(f"cannot delete {place} on {host.name} ({told.trouble})", "check its rights")
            continue
        source = folder / "full" / each.path
        if not source.is_file() or digest_of(source) != each.sealed_sha256:
            raise UserError(f"the kit does not hold {each.path}", "bring the file by hand; patches.json has its hash")
        mode = host.run('stat -c %a -- "$1" 2>/dev/null || echo 644', place, privileged=True).stdout.strip()
        host.write(place, source.read_bytes(), mode=int(mode or "644", 8), privileged=True)


def remove(host: Host, root: str, paths: Sequence[str]) -> None:
    """Remove files below ``root``."""
    told = host.run('cd -- "$1" && shift && rm -f -- "$@"', root, *paths, privileged=True)
    if told.exit_code:
        raise UserError(f"cannot delete {paths[0]} in {root} on {host.name} ({told.trouble})", "check its rights")


def _needed(sealed: EnvironmentRecord) -> list[Package]:
    return [each for each in sealed.packages if each.name not in _INSTALLERS]


def _identity(wheel: Path) -> tuple[str, str]:
    name, version = [*wheel.name.split("-"), ""][:2]
    return re.sub(r"[-_.]+", "-", name).lower(), version
