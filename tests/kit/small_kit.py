"""A kit of made-up content, sealed by the product: for damage, archives and signatures, where no service is needed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ddtree.kit import bag
from ddtree.kit.create import finish
from ddtree.kit.durable import appearing
from ddtree.kit.record import FetchList, KitRecord, Place, WeightFile

DEPLOYMENT = """
[engine]
kind = "native"

[model]
path = "/models/tiny"

[speculation]
algorithm = "none"

[runtime]
device = "cpu"

[service]
name = "tiny"
supervisor = "process"
port = 8021
"""


def make_small_kit(place: Path, sealed: str = "2026-01-02T03:04:05+00:00") -> Path:
    """Write it; the same every time."""
    with appearing(place) as draft:
        (draft / "deployment.toml").write_text(DEPLOYMENT)
        (draft / "verify.json").write_text(json.dumps({"verdict": "proven", "findings": []}) + "\n")
        weights = WeightFile(path="model.safetensors", size_bytes=9, sha256=hashlib.sha256(b"weights!\n").hexdigest())
        (draft / "model").mkdir()
        (draft / "model" / "fetch.json").write_text(FetchList(source="unknown", files=[weights]).model_dump_json())
        (draft / "logs").mkdir()
        (draft / "logs" / "service.log").write_text("".join(f"line {n} of the log\n" for n in range(200)))
        (draft / "bench" / "scripts").mkdir(parents=True)
        (draft / "bench" / "scripts" / "empty").write_text("")
        (draft / "bench" / "scripts" / "bytes.bin").write_bytes(bytes(range(256)) * 4)
        finish(
            draft,
            KitRecord(
                name=place.name,
                created=sealed,
                sealed=sealed,
                tool="ddtree test",
                places=[
                    Place(name="tiny", folder=".", host="local", engine="native", is_running=True, verdict="proven")
                ],
            ),
        )
    assert (place / bag.MANIFEST).is_file()
    return place
