"""RO-Crate metadata of a kit: a Process Run Crate, in which each measured configuration is one run of ddtree."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import ddtree
from ddtree.kit.record import EXPERIMENT, ExperimentRecord, KitRecord, read_record

METADATA = "ro-crate-metadata.json"
_PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
_LICENCE_UNKNOWN = "The licence of measurements and configuration is the owner's to state."


def write_crate(payload: Path, kit: KitRecord) -> None:
    """Write ``ro-crate-metadata.json`` into the payload, over what is there."""
    from rocrate.model.contextentity import ContextEntity  # type: ignore[import-untyped]
    from rocrate.rocrate import ROCrate  # type: ignore[import-untyped]

    crate = ROCrate(version="1.1")
    crate.name = kit.name
    crate.description = f"Reproduction kit of {', '.join(place.name for place in kit.places)}; verdict: {kit.verdict}"
    crate.datePublished = datetime.fromisoformat(kit.sealed)
    crate.license = _LICENCE_UNKNOWN
    crate.root_dataset["conformsTo"] = crate.add(
        ContextEntity(crate, _PROFILE, {"@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"})
    )
    tool = crate.add(
        ContextEntity(
            crate,
            "#ddtree",
            {
                "@type": "SoftwareApplication",
                "name": "ddtree",
                "softwareVersion": ddtree.__version__,
                "url": "https://arxiv.org/abs/2604.12989",
            },
        )
    )
    files = {}
    for path in sorted(path for path in payload.rglob("*") if path.is_file()):
        name = path.relative_to(payload).as_posix()
        if name != METADATA:
            properties = {"name": name, "contentSize": str(path.stat().st_size), "encodingFormat": _format(name)}
            files[name] = crate.add_file(str(path), name, properties=properties)
    actions = []
    for identity in kit.experiments:
        experiment = read_record(ExperimentRecord, payload / "experiments" / identity / EXPERIMENT)
        results = [entity for name, entity in files.items() if name.startswith(f"{experiment.results}/")]
        action = crate.add(
            ContextEntity(
                crate,
                f"#run-{identity}",
                {
                    "@type": "CreateAction",
                    "name": f"{experiment.label}: {experiment.configuration}",
                    "description": " ".join(experiment.command) or "ddtree bench",
                    "startTime": experiment.started,
                    "endTime": experiment.ended,
                    "actionStatus": "http://schema.org/CompletedActionStatus",
                },
            )
        )
        action["instrument"] = tool
        action["object"] = files["deployment.toml"]
        action["result"] = [*results, files[f"experiments/{identity}/{EXPERIMENT}"]]
        actions.append(action)
    if actions:
        crate.root_dataset["mentions"] = actions
    crate.metadata.write(str(payload))


def _format(name: str) -> str:
    endings = {
        ".json": "application/json",
        ".jsonl": "application/jsonl",
        ".toml": "application/toml",
        ".md": "text/markdown",
        ".html": "text/html",
        ".svg": "image/svg+xml",
        ".diff": "text/x-diff",
        ".py": "text/x-python",
    }
    return next((kind for ending, kind in endings.items() if name.endswith(ending)), "text/plain")
