"""Making a kit, and adding results to one: all of it or nothing of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import ddtree
from ddtree.errors import UserError
from ddtree.kit import bag
from ddtree.kit.capture import CaptureOptions, Source, Tell, capture, learn_secrets
from ddtree.kit.crate import write_crate
from ddtree.kit.durable import appearing, replacing
from ddtree.kit.experiments import copy_results, copy_tree, write_experiments
from ddtree.kit.guide import guide
from ddtree.kit.mask import Masker
from ddtree.kit.names import checked, slug
from ddtree.kit.record import KIT, VERIFY, KitRecord, Masked, read_record

RESULTS = "bench/results"


@dataclass(frozen=True, kw_only=True)
class CreateOptions:
    """What goes into a kit.

    Attributes:
        results: folders of bench or sweep.
        extras: scripts, sweep files and prompts; they go to ``bench/``.
        even_if_failing: seal although a service is not proven.
        is_strict: refuse secrets instead of masking them.
    """

    out: Path
    sources: tuple[Source, ...]
    results: tuple[Path, ...] = ()
    extras: tuple[Path, ...] = ()
    note: str = ""
    even_if_failing: bool = False
    is_strict: bool = False
    capture: CaptureOptions = field(default_factory=CaptureOptions)


def create(options: CreateOptions, tell: Tell = lambda stage: None) -> KitRecord:
    """Capture, seal, and only then let the kit appear at ``out``.

    Raises:
        UserError: a service fails, a secret is found in strict mode, or something cannot be captured: nothing is left.
    """
    names = [source.deployment.name for source in options.sources]
    if not names:
        raise UserError("a kit needs a deployment", "name one or more deployment files")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two deployments are called {twice}", "give services different names")
    checked(options.out.name)
    masker = Masker(is_strict=options.is_strict)
    with appearing(options.out) as draft:
        for source in options.sources:
            tell(f"{source.deployment.name}: reaching its host")
            learn_secrets(source, masker)
        places, reasons = [], []
        for number, source in enumerate(options.sources):
            folder = "." if number == 0 else f"more/{slug(source.deployment.name)}"
            places.append(capture(source, draft, folder, masker, options.capture, tell))
            reasons.append(_broken_claims(draft / folder / VERIFY))
        failing = [place for place in places if place.verdict != "proven"]
        if failing and not options.even_if_failing:
            told = ", ".join(
                f"{place.name} is {_in_words(place.verdict)}{reason}"
                for place, reason in zip(places, reasons, strict=True)
                if place.verdict != "proven"
            )
            raise UserError(
                f"not sealed: {told}", "see ddtree verify, or seal it as it is with --even-if-failing: the kit says so"
            )
        _copy_extras(options.extras, draft, masker)
        tell("results")
        results = copy_results(options.results, draft, masker)
        now = _now()
        kit = KitRecord(
            name=options.out.name,
            created=now,
            sealed=now,
            tool=f"ddtree {ddtree.__version__}",
            places=places,
            results=results,
            experiments=write_experiments(draft, results),
            even_if_failing=bool(failing),
            notes=[masker.text(options.note, "kit.json")] if options.note else [],
        )
        kit = kit.model_copy(update={"masked": masker.masked})
        tell("sealing")
        finish(draft, kit)
    return kit


def add(
    place: Path,
    results: Sequence[Path],
    extras: Sequence[Path] = (),
    *,
    is_strict: bool = False,
    tell: Tell = lambda stage: None,
) -> KitRecord:
    """Add results to a kit that is a folder, and seal it anew; the manifest that it had stays inside.

    Signatures were over that manifest and go with it.

    Raises:
        UserError: the kit does not pass its check, or the results are there already.
    """
    from ddtree.kit.check import check_folder

    if not place.is_dir():
        raise UserError(f"{place} is no folder", "unpack the kit, add to it, and pack it again")
    tell("checking the kit as it is")
    found = check_folder(place)
    if not found.is_whole:
        raise UserError(f"{place} does not pass its check: {found.faults[0]}", "see ddtree kit check")
    kit = read_record(KitRecord, place / bag.PAYLOAD / KIT)
    masker = Masker(is_strict=is_strict)
    with replacing(place) as draft:
        shutil.copytree(place / bag.PAYLOAD, draft, dirs_exist_ok=True)
        earlier = _keep_manifest(place, draft, len(kit.earlier) + 1)
        _copy_extras(extras, draft, masker)
        added = copy_results(results, draft, masker)
        experiments = write_experiments(draft, added)
        kit = kit.model_copy(
            update={
                "sealed": _now(),
                "tool": f"ddtree {ddtree.__version__}",
                "results": [*kit.results, *added],
                "experiments": [*kit.experiments, *experiments],
                "masked": _joined([*kit.masked, *masker.masked]),
                "earlier": [*kit.earlier, earlier],
            }
        )
        tell("sealing")
        finish(draft, kit)
    return kit


def finish(draft: Path, kit: KitRecord) -> None:
    """Write what tells of the whole, and seal: the last step before a kit appears."""
    _write_report(draft, kit)
    (draft / KIT).write_text(kit.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (draft / "README.md").write_text(guide(kit, draft), encoding="utf-8")
    write_crate(draft, kit)
    bag.seal(
        draft,
        {
            "Bagging-Date": kit.sealed[:10],
            "External-Identifier": kit.name,
            "External-Description": f"ddtree reproduction kit, verdict {kit.verdict}",
        },
    )


def _write_report(draft: Path, kit: KitRecord) -> None:
    """``REPORT.md`` and ``REPORT.html`` from the results."""
    from ddtree.report.write import ReportOptions, write_report

    if not kit.results:
        return
    folder = draft / "bench" / "report"
    shutil.rmtree(folder, ignore_errors=True)
    folders = tuple(draft / each for each in kit.results)
    written = write_report(ReportOptions(folders=folders, out=folder, title=kit.name, with_plots=_has_plots()))
    written.markdown.replace(draft / "REPORT.md")
    written.html.replace(draft / "REPORT.html")
    figures = draft / "figures"
    shutil.rmtree(figures, ignore_errors=True)
    if (folder / "figures").is_dir() and any((folder / "figures").iterdir()):
        (folder / "figures").rename(figures)
    shutil.rmtree(folder)


def _has_plots() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def _copy_extras(extras: Sequence[Path], draft: Path, masker: Masker) -> None:
    for extra in extras:
        place = f"bench/{slug(extra.resolve().name)}"
        target = draft / place
        if target.exists() or place == RESULTS:
            raise UserError(f"the kit has {place} already", f"rename {extra}")
        if extra.is_dir():
            copy_tree(extra, target, place, masker)
        elif extra.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(masker.content(extra.read_bytes(), place))
        else:
            raise UserError(f"there is no {extra}", "give --extra files or folders")


def _keep_manifest(place: Path, draft: Path, number: int) -> str:
    folder = draft / "earlier" / f"{number:03d}"
    folder.mkdir(parents=True)
    for path in sorted(place.iterdir()):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if (place / bag.SIGNATURES).is_dir():
        shutil.copytree(place / bag.SIGNATURES, folder / bag.SIGNATURES)
    return f"earlier/{number:03d}/{bag.MANIFEST}"


def _joined(masked: Sequence[Masked]) -> list[Masked]:
    return list({(each.file, each.kind): each for each in masked}.values())


def _in_words(verdict: str) -> str:
    return "not proven to do what it declares" if verdict == "unknown" else "not what it declares"


def _broken_claims(verdict: Path) -> str:
    """The violated claims of a verdict, in brackets; empty where none is."""
    findings = json.loads(verdict.read_text(encoding="utf-8")).get("findings", [])
    broken = [
        f"{finding['claim']}: {', '.join(finding['evidence'])}"
        for finding in findings
        if finding["status"] == "violated"
    ]
    return f" ({'; '.join(broken)})" if broken else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
