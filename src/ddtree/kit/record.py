"""What the files of a kit hold that are ours to define: one versioned schema, read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddtree.errors import UserError
from ddtree.kit.names import PlainPath

SCHEMA_VERSION = "1.0"

KIT = "kit.json"
PROCESS = "process.json"
PATCHES = "patches/patches.json"
ENVIRONMENT = "env/environment.json"
FETCH = "fetch.json"
VERIFY = "verify.json"
EXPERIMENT = "experiment.json"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Origin = Literal["index", "editable", "url", "local", "unknown"]
Change = Literal["edited", "added", "deleted"]


class Record(BaseModel):
    """Unknown fields are refused, so that a reader of another version says so."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Masked(Record):
    """Secrets of one kind that were taken out of one file. ``file`` is relative to the payload."""

    file: str
    kind: str
    times: int


class Place(Record):
    """One deployment of a kit. ``folder`` is relative to the payload; ``.`` for the first one."""

    name: str
    folder: Literal["."] | PlainPath
    host: str
    engine: str
    is_running: bool
    verdict: Literal["proven", "violated", "unknown"]
    notes: list[str] = []


class KitRecord(Record):
    """``kit.json``: what is in a kit, and what could not be captured.

    Attributes:
        sealed: UTC, ISO 8601, of the newest sealing.
        even_if_failing: it was sealed although a service is not proven to do what it declares.
        masked: what was taken out.
        earlier: manifests of earlier sealings, oldest first, relative to the payload.
    """

    schema_version: Literal["1.0"] = "1.0"
    name: str
    created: str
    sealed: str
    tool: str
    places: list[Place]
    experiments: list[PlainPath] = []
    results: list[PlainPath] = []
    even_if_failing: bool = False
    masked: list[Masked] = []
    earlier: list[PlainPath] = []
    notes: list[str] = []

    @property
    def verdict(self) -> str:
        """The worst one."""
        found = {place.verdict for place in self.places}
        return next((word for word in ("violated", "unknown", "proven") if word in found), "unknown")


class ProcessRecord(Record):
    """``process.json``: the process that served while the kit was made."""

    pid: int
    started: str
    invocation: str
    executable: str | None
    folder: str | None
    arguments: list[str]
    environment: dict[str, str]
    as_rendered: bool


class Package(Record):
    """One installed distribution.

    Attributes:
        content_sha256: of the sorted hashes in its RECORD, installers' own files left out: the same wherever the same
            wheel was installed.
        wheel_sha256: of the wheel that an index serves for this machine, where one does.
    """

    name: str
    version: str
    origin: Origin
    content_sha256: str | None = None
    wheel_sha256: str | None = None


class EnvironmentRecord(Record):
    """``env/environment.json``: what the engine's interpreter has installed."""

    python: str
    implementation: str
    machine: str
    site_packages: str
    packages: list[Package]
    notes: list[str] = []


class PatchedFile(Record):
    """A file of an engine's package that is not as released.

    Attributes:
        path: below ``site_packages``.
        base_sha256: as released; None for an added file.
        sealed_sha256: as sealed; None for a deleted file.
        is_masked: a secret was taken out of the sealed file, so that it cannot be put back as it was.
    """

    path: PlainPath
    package: str
    change: Change
    base_sha256: Sha256 | None
    sealed_sha256: Sha256 | None
    is_masked: bool = False


class PatchRecord(Record):
    """``patches/patches.json``. ``base``: what the package was compared with."""

    package: str | None
    version: str | None
    base: Literal["wheel", "RECORD", "none"]
    wheel_sha256: str | None = None
    files: list[PatchedFile] = []
    notes: list[str] = []


class WeightFile(Record):
    """A file of a weights folder. ``url``: where it comes from; ``in_kit``: it lies beside this list."""

    path: PlainPath
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    in_kit: bool = False


class FetchList(Record):
    """``fetch.json``: a weights folder by content, so that a kit is complete without it.

    Attributes:
        source: ``hub``: repo and revision say whence; ``urls``: each file does; ``demo``: the service fetches them
            itself; ``unknown``: to be brought by hand.
    """

    schema_version: Literal["1.0"] = "1.0"
    source: Literal["hub", "urls", "demo", "unknown"]
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    files: list[WeightFile] = []
    notes: list[str] = []


class CellSummary(Record):
    """A measured cell in short: median, low and high of the 95 % interval."""

    workload: str
    context_tokens: int | None
    concurrency: int
    temperature: float
    requests: int
    errors: dict[str, int]
    user_tok_s: tuple[float, float, float] | None
    total_tok_s: tuple[float, float, float] | None
    ttft_ms: tuple[float, float, float] | None
    tau: tuple[float, float, float] | None


class ExperimentRecord(Record):
    """``experiment.json``: one measured configuration.

    Attributes:
        results: its result folder, relative to the payload.
        command: how it was measured; ``service_command`` and ``service_environment``: what was measured.
        commit: of ddtree's checkout, where it ran from one.
        verdict: of the verification before it was measured.
    """

    schema_version: Literal["1.0"] = "1.0"
    id: PlainPath
    run_id: str
    label: str
    configuration: str
    variant: str
    results: PlainPath
    settings: dict[str, Any]
    command: list[str]
    service_command: list[str] | None
    service_environment: dict[str, str] | None
    server_facts: dict[str, Any]
    engine: str
    versions: dict[str, str | None]
    commit: str | None
    host: dict[str, Any]
    gpus: list[dict[str, str]]
    started: str
    ended: str
    is_complete: bool
    verdict: str | None
    deployment_sha256: str | None
    workloads: dict[str, str]
    cells: list[CellSummary]


_Kind = TypeVar("_Kind", bound=BaseModel)


def read_record(kind: type[_Kind], path: Path) -> _Kind:
    """Read one of these files.

    Raises:
        UserError: it is not there, or not of this version.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path.name} of the kit ({error.strerror})", "ddtree kit check tells") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "content"
        raise UserError(
            f"{path.name} of the kit is not of this version ({place}: {first['msg']})", "use the ddtree that wrote it"
        ) from None
