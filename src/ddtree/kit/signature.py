"""Signatures by SSH keys over a kit's manifest: against tampering, where hashes alone see accidents."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddtree.disk import write_whole
from ddtree.errors import UserError
from ddtree.kit import bag

NAMESPACE = "ddtree-kit"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"


@dataclass(frozen=True)
class Signature:
    """What is known of one signature.

    Attributes:
        fingerprint: of the key, as ``ssh-keygen -l`` tells it.
        is_good: it is over this manifest, by that key.
        signer: who that is by the list of allowed signers; None: nobody in it, or no list was given.
        trouble: why it is not good.
    """

    fingerprint: str
    is_good: bool
    signer: str | None = None
    trouble: str = ""


def sign(folder: Path, key: Path) -> str:
    """Sign the manifest with a private key, or with a public one whose private half is in the agent.

    The kit names who signed it, so that a signature that is taken away is missed.

    Returns:
        the key's fingerprint.

    Raises:
        UserError: there is no such key, or ssh-keygen refuses.
    """
    with tempfile.TemporaryDirectory(prefix="ddtree-kit-") as scratch:
        manifest = Path(scratch) / "manifest"
        shutil.copyfile(folder / bag.MANIFEST, manifest)
        done = _keygen("-Y", "sign", "-n", NAMESPACE, "-f", str(key), str(manifest))
        if done.returncode:
            raise UserError(f"{key} does not sign ({_last(done)})", "name a private SSH key, or one of the agent's")
        text = Path(f"{manifest}.sig").read_text(encoding="ascii")
    fingerprint = fingerprint_in(text)
    place = folder / bag.SIGNATURES / f"{_file_name(fingerprint)}.sig"
    place.parent.mkdir(exist_ok=True)
    write_whole(place, canonical(text))
    pairs = [pair for pair in bag.read_info(folder) if pair != (bag.SIGNED_BY, fingerprint)]
    bag.write_info(folder, [*pairs, (bag.SIGNED_BY, fingerprint)])
    bag.seal_tags(folder)
    return fingerprint


def expected_files(folder: Path) -> list[str]:
    """Signature files that the kit says it has, relative to it."""
    signers = [value for name, value in bag.read_info(folder) if name == bag.SIGNED_BY]
    return [f"{bag.SIGNATURES}/{_file_name(each)}.sig" for each in signers]


def verify(folder: Path, file: Path, allowed_signers: Path | None = None) -> Signature:
    """Check one signature, with its own key, and against who is allowed where a list is given."""
    try:
        text = file.read_text(encoding="ascii")
        fingerprint = fingerprint_in(text)
    except (OSError, ValueError, UnicodeDecodeError):
        return Signature("?", False, trouble="it is no SSH signature")
    if text != canonical(text) or file.name != f"{_file_name(fingerprint)}.sig":
        return Signature(fingerprint, False, trouble="it was altered")
    manifest = (folder / bag.MANIFEST).read_bytes()
    done = _keygen("-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(file), stdin=manifest)
    if done.returncode:
        return Signature(fingerprint, False, trouble=f"it is not of this manifest ({_last(done)})")
    if allowed_signers is None:
        return Signature(fingerprint, True)
    found = _keygen("-Y", "find-principals", "-f", str(allowed_signers), "-s", str(file))
    names = found.stdout.decode(errors="replace").split()
    for name in names:
        words = ("-Y", "verify", "-f", str(allowed_signers), "-I", name, "-n", NAMESPACE, "-s", str(file))
        if _keygen(*words, stdin=manifest).returncode == 0:
            return Signature(fingerprint, True, name)
    return Signature(fingerprint, True, None, f"nobody in {allowed_signers.name} has this key")


def can_verify() -> bool:
    """Whether this machine has what it takes."""
    return shutil.which("ssh-keygen") is not None


def fingerprint_in(text: str) -> str:
    """Of the key inside a signature, which carries it.

    Raises:
        ValueError: it is no signature.
    """
    raw = _raw(text)
    if raw[:6] != b"SSHSIG" or len(raw) < 14:
        raise ValueError("no SSH signature")
    size = int.from_bytes(raw[10:14], "big")
    if not 0 < size <= len(raw) - 14:
        raise ValueError("no SSH signature")
    digest = base64.b64encode(hashlib.sha256(raw[14 : 14 + size]).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def canonical(text: str) -> str:
    """The one way in which a signature is written here."""
    body = base64.b64encode(_raw(text)).decode()
    lines = [body[at : at + 70] for at in range(0, len(body), 70)]
    return "\n".join([_BEGIN, *lines, _END]) + "\n"


def _raw(text: str) -> bytes:
    body = text.strip()
    if not body.startswith(_BEGIN) or not body.endswith(_END):
        raise ValueError("no SSH signature")
    return base64.b64decode("".join(body[len(_BEGIN) : -len(_END)].split()), validate=True)


def _file_name(fingerprint: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "-", fingerprint.removeprefix("SHA256:")).strip("-")


def _keygen(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments],
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UserError("no ssh-keygen on this machine", "install the OpenSSH client") from None
    except subprocess.TimeoutExpired:
        raise UserError("ssh-keygen did not answer within a minute", "unlock the key in ssh-agent first") from None


def _last(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
