"""The sections of a deployment file, one class each; the texts under the keys are what people are told of them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ddtree.deploy.section import (
    Count,
    EnvironmentName,
    HostPath,
    HostPaths,
    OwnFile,
    Seconds,
    Section,
    Text,
    Texts,
    matching,
    refuse,
    without_duplicates,
)
from ddtree.draft_temperature import COLDEST, HOTTEST

EngineKind = Literal["native", "sglang", "vllm"]
Algorithm = Literal["ddtree", "dflash", "none", "custom"]
SupervisorKind = Literal["systemd", "process"]

_SECRET_NAME = re.compile(r"(?i)((^|_)(token|key|secret|pass(word|wd|phrase)?|credential)s?|apikeys?)$")
_URL_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


class Engine(Section):
    """What serves the model."""

    kind: EngineKind
    """native: ddtree's own, one GPU or CPU. sglang, vllm: engines of their own, for several GPUs."""
    venv: HostPath | None = None
    """Virtual environment on the host that holds the engine."""
    executable: HostPath | None = None
    """Instead of venv: the program that the flags go to: `ddtree`, `vllm`, or for sglang its Python."""

    @model_validator(mode="after")
    def _one_place(self) -> Engine:
        if self.venv and self.executable:
            refuse("has both venv and executable", "keep one of them")
        return self


class Weights(Section):
    """Where weights are on the host, and where they come from."""

    path: HostPath | None = None
    """Folder on the host. With hub as well: where `ddtree fetch` puts them."""
    hub: Annotated[Text, *matching(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", "write owner/name")] | None = None
    """Repository on the Hugging Face hub, owner/name."""
    revision: Annotated[str, *matching(r"[0-9a-f]{40}", "write the full commit, 40 hex digits")] | None = None
    """Commit of the hub repository; a branch name could change what runs."""

    @model_validator(mode="after")
    def _pinned(self) -> Weights:
        if self.hub and not self.revision:
            refuse("has hub without revision", "add revision = the full commit, 40 hex digits")
        if self.revision and not self.hub:
            refuse("has revision without hub", "add hub = owner/name, or leave revision out")
        return self


class Model(Weights):
    """The target."""

    demo: bool = False
    """The demo's SmolLM2-135M-Instruct and its drafter, fetched by the service at its first start (native only)."""
    served_name: Annotated[Text, *matching(r"[A-Za-z0-9][\w./:-]*", "use letters, digits and _ . / : -")] | None = None
    """Name that clients give. Default: the folder's or the repository's."""
    attention: Literal["mha", "mla"] | None = None
    """How the target attends, which decides the attention backends that can verify trees. Kimi K2, DeepSeek V3: mla."""
    trust_remote_code: bool = False
    """Let the engine run Python code that comes with the weights (sglang, vllm)."""

    @model_validator(mode="after")
    def _somewhere(self) -> Model:
        if self.demo and (self.path or self.hub):
            refuse("has demo beside path or hub", "keep one of them")
        if not self.demo and not self.path and not self.hub:
            refuse("names no weights", "add path = a folder on the host, hub and revision, or demo = true")
        return self


class Drafter(Weights):
    """The DFlash drafter that was trained for the target."""

    @model_validator(mode="after")
    def _somewhere(self) -> Drafter:
        if not self.path and not self.hub:
            refuse("names no weights", "add path = a folder on the host, or hub and revision")
        return self


class Parallelism(Section):
    """How the model is spread over GPUs."""

    tp: Count = 1
    """Tensor parallelism: GPUs that share each layer."""
    ep: Count = 1
    """Expert parallelism: GPUs that the experts are spread over."""
    pp: Count = 1
    """Pipeline parallelism: groups of layers after each other. Not with speculation."""
    dp: Count = 1
    """Data parallelism: copies of the model, or of its attention with dp_attention."""
    dp_attention: bool = False
    """Data parallelism in attention alone (sglang)."""
    nodes: Count = 1
    """Machines that share one model. Above 1 a file is rendered for each machine, but not applied."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """Which of the nodes this file is for, from 0."""
    init_address: Annotated[Text, *matching(r"[A-Za-z0-9\[][\w.:\[\]-]*:\d{1,5}", "write address:port")] | None = None
    """address:port of node 0, where the nodes find each other."""

    @model_validator(mode="after")
    def _nodes(self) -> Parallelism:
        if self.nodes > 1 and not self.init_address:
            refuse("has nodes above 1 without init_address", "add init_address = address:port of node 0")
        if self.nodes == 1 and self.init_address:
            refuse("has init_address with one node", "leave it out, or set nodes")
        if self.node_rank >= self.nodes:
            refuse(f"has node_rank {self.node_rank} of {self.nodes} nodes", "ranks go from 0 to nodes - 1")
        return self


OF_DRAFTS = ("budget", "topk_cap", "block_size", "draft_window", "draft_temperature")
"""Keys of `Speculation` that mean nothing without drafts."""

OF_TREES = ("topk_cap", "draft_temperature")
"""Of these, the ones that mean nothing to a chain."""


class Speculation(Section):
    """How the target is helped along."""

    algorithm: Algorithm
    """ddtree: draft trees. dflash: a chain. none: one token a step. custom: the engine's own, by runtime.extra_args."""
    budget: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] | None = None
    """Nodes of a draft tree, 1 to 1024, or `auto` (native): what promises most at each round."""
    topk_cap: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Candidates per position of the tree. Default: min(budget, 64)."""
    block_size: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Tokens of a drafted block, root included. Default: the drafter's own."""
    draft_window: Count | None = None
    """Recent context tokens that the drafter attends to. Default: all."""
    draft_temperature: Annotated[float, Field(ge=COLDEST, le=HOTTEST)] | None = None
    """Temperature of the drafter's probabilities that trees are built from, 0.1 to 10: below 1 they grow deeper, above
    1 broader. Default: the drafter's own."""


class Runtime(Section):
    """How the engine runs."""

    device: Literal["cuda", "cpu"] = "cuda"
    """What it computes on."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of both models; auto: as the weights are."""
    cuda_graphs: bool | None = None
    """Replay captured CUDA graphs. Default: the engine's, which is to do so on a GPU."""
    cuda_graph_sizes: Annotated[tuple[Count, ...], Field(strict=False), AfterValidator(without_duplicates)] = ()
    """Batch sizes to capture graphs for. Default: the engine's."""
    nvls: bool = False
    """NCCL reduces inside the NVLink switch (sglang, NVLink machines)."""
    attention_backend: Annotated[str, *matching(r"[A-Za-z0-9_]+", "write the engine's name for it")] | None = None
    """The engine's attention backend, by its own name."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of GPU memory for weights and caches (native: of what is free after loading). Default: the engine's."""
    max_running_requests: Count | None = None
    """Requests decoded at the same time. Default: the engine's."""
    context_length: Count | None = None
    """Longest context in tokens. Default: the model's."""
    threads: Count | None = None
    """CPU threads (native)."""
    exact: bool = False
    """One text in every mode and batch, to the last bit; slower (native)."""
    extra_args: Texts = ()
    """Further flags for the engine, as they are. What a key of this file says is refused here."""
    env: dict[EnvironmentName, Text] = Field(default_factory=dict)
    """Environment of the service. Secrets belong into [secrets]."""

    @model_validator(mode="after")
    def _no_secrets(self) -> Runtime:
        for name, value in self.env.items():
            if _SECRET_NAME.search(name) or _URL_PASSWORD.search(value):
                what = "looks like a secret" if _SECRET_NAME.search(name) else "holds a password"
                refuse(f"has env.{name}, which {what}", f"move it to [secrets.env] {name} = {{ file = ... }}")
        return self


class Service(Section):
    """The service on the host."""

    name: Annotated[str, *matching(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", "use letters, digits and _ . -, at most 63")]
    """Name of the unit, of its folders and of its lock."""
    supervisor: SupervisorKind = "systemd"
    """What keeps it running. process: no systemd needed, but nothing restarts it and a reboot ends it."""
    user: Annotated[str, *matching(r"[a-z_][a-z0-9_-]{0,31}", "write the name of a user on the host")] | None = None
    """User that it runs as. Default: one that systemd makes up for it (process: who deploys)."""
    description: Text | None = None
    """Shown by systemctl. Default: model and engine."""
    address: Annotated[Text, *matching(r"[A-Za-z0-9:][\w.:-]*", "write an address or a host name")] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """Port to listen on."""
    allow_unauthenticated: bool = False
    """Listen on an address of other machines without a key."""
    allow_key_in_log: bool = False
    """SGLang writes its key into its own log: accept that, so that [secrets] api_key can be used with it."""
    restart: Literal["always", "on-failure", "no"] | None = None
    """When it is started again. Default: on-failure with systemd; a process is never started again."""
    restart_delay_s: Seconds = 5.0
    """Pause before it is started again."""
    max_restarts: Count = 5
    """Starts within ten minutes after which systemd gives up."""
    ready_timeout_s: Seconds = 1800.0
    """How long apply waits for the first completion."""
    stop_timeout_s: Seconds = 60.0
    """After SIGTERM, time to end before SIGKILL."""
    enabled: bool = True
    """Start at boot (systemd)."""
    log: Literal["journal"] | HostPath | None = None
    """`journal` or a file on the host. Default: the journal with systemd, a file in the state folder otherwise."""
    read_write_paths: HostPaths = ()
    """Folders that it may write, beside its own state and cache (systemd)."""
    memory_max_gib: Annotated[float, Field(ge=0.01, le=2**20)] | None = None
    """Most memory of the host it may take (systemd)."""
    cpu_quota_percent: Count | None = None
    """Most CPU time, 100 for each core (systemd)."""
    open_files: Annotated[int, Field(ge=64, le=2**30)] = 1048576
    """Most open files (systemd)."""
    tasks_max: Count | None = None
    """Most processes and threads (systemd)."""


class Secret(Section):
    """Where the deploying machine finds a secret. It goes to the host in a file of mode 0600, and nowhere else."""

    file: OwnFile | None = None
    """A file that holds it."""
    env: EnvironmentName | None = None
    """A variable of the environment that `ddtree deploy` runs in."""

    @model_validator(mode="after")
    def _one_source(self) -> Secret:
        if (self.file is None) == (self.env is None):
            refuse("needs one source", "write { file = ... } or { env = ... }")
        return self


class Secrets(Section):
    """Secrets of the service."""

    api_key: Secret | None = None
    """Key that clients must show."""
    env: dict[EnvironmentName, Secret] = Field(default_factory=dict)
    """Secret variables of the service's environment, such as HF_TOKEN."""


class Host(Section):
    """The machine that is deployed to."""

    kind: Literal["local", "ssh"] = "local"
    """local: this one. ssh: another one, by the OpenSSH client and its configuration."""
    address: (
        Annotated[Text, *matching(r"[A-Za-z0-9_:][\w.:%-]*", "write an address or a name of ~/.ssh/config")] | None
    ) = None
    """Address, or a name of ~/.ssh/config."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of its SSH server."""
    user: Annotated[Text, *matching(r"[\w.][\w.-]*", "write the name of a user on the host")] | None = None
    """User to log in as."""
    identity_file: OwnFile | None = None
    """Private key to log in with."""
    known_hosts_file: OwnFile | None = None
    """Keys of known hosts. Default: ~/.ssh/known_hosts. A host that is not in it is refused."""
    privilege: Literal["root", "sudo"] | None = None
    """How the system is changed, with systemd: root (default): the user who deploys is root. sudo: by `sudo -n`."""

    @model_validator(mode="after")
    def _ssh_keys(self) -> Host:
        if self.kind == "ssh":
            if not self.address:
                refuse("has kind ssh without address", "add address = the host's name")
            return self
        for key in ("address", "port", "user", "identity_file", "known_hosts_file"):
            if getattr(self, key) is not None:
                refuse(f"has {key} with kind local", 'leave it out, or set kind = "ssh"')
        return self

    @field_validator("known_hosts_file", "identity_file")
    @classmethod
    def _no_quotes(cls, value: str | None) -> str | None:
        if value and '"' in value:
            refuse(f"is {value!r}, and ssh takes no quotes in it", "choose another name for the file")
        return value


class Expect(Section):
    """What `ddtree verify` holds the running service to."""

    tau_floor: Annotated[float, Field(ge=1)] | None = None
    """Committed tokens per round, at least. Default, where speculation is declared: half of what the drafter's folder
    promises, from 1.2 to 2; 1.2 where it promises nothing."""
    tok_s_floor: Annotated[float, Field(gt=0)] | None = None
    """Tokens a second of one request after its first token, at least."""
    cuda_graphs: bool | None = None
    """Graphs are really replayed. Default: as runtime.cuda_graphs, which is yes on a GPU."""
