"""Signatures by SSH keys: they are of this manifest, by that key, and are missed when they are gone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddtree.errors import UserError
from ddtree.kit import bag
from ddtree.kit.check import check_folder
from ddtree.kit.sign_kit import sign_kit

from .conftest import ddtree
from .small_kit import make_small_kit


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path


def signers(path: Path, **keys: Path) -> Path:
    lines = [f'{name} namespaces="ddtree-kit" {key.with_suffix(".pub").read_text()}' for name, key in keys.items()]
    path.write_text("".join(lines))
    return path


def test_it_is_signed_and_checked(tmp_path: Path) -> None:
    kit = make_small_kit(tmp_path / "kit")
    one, two, stranger = (make_key(tmp_path / name) for name in ("one", "two", "stranger"))
    ddtree("kit", "sign", kit, "--key", one)
    sign_kit(kit, two)
    sign_kit(kit, one)  # again: nothing is doubled
    found = check_folder(kit, allowed_signers=signers(tmp_path / "allowed", ann=one, bob=two))
    assert found.is_whole and {each.signer for each in found.signatures} == {"ann", "bob"}
    subprocess.run(["sha256sum", "--quiet", "-c", bag.MANIFEST, bag.TAG_MANIFEST], cwd=kit, check=True)
    nobody = check_folder(kit, allowed_signers=signers(tmp_path / "others", eve=stranger))
    assert any(fault.startswith("unsigned") for fault in nobody.faults)
    done = ddtree("kit", "check", kit, "--signers", tmp_path / "others", check=False)
    assert done.returncode == 1 and "unsigned" in done.stdout


def test_tampering_that_reseals_is_found(tmp_path: Path) -> None:
    """Hashes alone would accept it."""
    kit = make_small_kit(tmp_path / "kit")
    sign_kit(kit, make_key(tmp_path / "key"))
    log = kit / "data" / "logs" / "service.log"
    log.write_text(log.read_text().replace("line 7 ", "line 8 "))
    lines = dict(reversed(line.split("  ", 1)) for line in (kit / bag.MANIFEST).read_text().splitlines())
    lines["data/logs/service.log"] = bag.digest_of(log)
    (kit / bag.MANIFEST).write_text(bag.told_manifest(lines))
    bag.seal_tags(kit)
    subprocess.run(["sha256sum", "--quiet", "-c", bag.MANIFEST, bag.TAG_MANIFEST], cwd=kit, check=True)
    assert any("not of this manifest" in fault for fault in check_folder(kit).faults)


def test_a_signature_that_was_taken_away_is_missed(tmp_path: Path) -> None:
    kit = make_small_kit(tmp_path / "kit")
    sign_kit(kit, make_key(tmp_path / "key"))
    next((kit / bag.SIGNATURES).iterdir()).unlink()
    (kit / bag.SIGNATURES).rmdir()
    assert any(fault.startswith("missing: signatures/") for fault in check_folder(kit).faults)


def test_what_is_damaged_is_not_signed(tmp_path: Path) -> None:
    kit = make_small_kit(tmp_path / "kit")
    key = make_key(tmp_path / "key")
    with pytest.raises(UserError, match="does not sign"):
        sign_kit(kit, tmp_path / "no-key")
    assert check_folder(kit).is_whole
    (kit / "data" / "verify.json").unlink()
    with pytest.raises(UserError, match="does not pass its check"):
        sign_kit(kit, key)
