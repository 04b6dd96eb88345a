"""Waiting until the new process has answered: not a ping, and not the old process in its place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from ddtree.deploy.deployment import Deployment
from ddtree.deploy.host import Host, HostError, LockedError
from ddtree.deploy.listeners import Listener
from ddtree.deploy.progress import Progress, Tell, quiet
from ddtree.deploy.supervisor import ProcessIdentity, Supervisor
from ddtree.plain_text import printable

POLL_S = 0.2
SLOWEST_POLL_S = 3.0
GPU_POLL_S = 5.0
LONGEST_ANSWER_S = 300.0
"""For the first completion: kernels may be compiled for it."""
LONGEST_BREAK_S = 120.0
"""The host may be out of reach for so long."""
LARGEST_BODY_BYTES = 1 << 20

_GPU_MEMORY = "nvidia-smi --query-gpu=memory.used,memory.total --format=csv,noheader,nounits 2>/dev/null"


class NotReady(Exception):
    """The service did not come to answer.

    Attributes:
        reason: in one line.
        stage: how far it had come.
    """

    def __init__(self, reason: str, stage: str) -> None:
        self.reason, self.stage = printable(reason), stage
        super().__init__(self.reason)


@dataclass(frozen=True)
class Ready:
    """A completion came back from the process that was started.

    Attributes:
        identity: of that process.
        waited_s: from its start to its first completion.
        text: of the completion.
        completion_tokens: that it counted.
    """

    identity: ProcessIdentity
    waited_s: float
    text: str
    completion_tokens: int


def connect_address(deployment: Deployment) -> str:
    """Where the service is reached from its own host."""
    address = deployment.service.address
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def await_ready(
    deployment: Deployment,
    host: Host,
    supervisor: Supervisor,
    identity: ProcessIdentity,
    *,
    api_key: str | None = None,
    timeout_s: float | None = None,
    tell: Tell = quiet,
    keep: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Ready:
    """Wait for the first completion of the process ``identity``.

    The port must be held by that process and nobody else both before the request and after the answer. A connection to
    the host that breaks meanwhile is made again.

    Args:
        keep: called at each look; keeps the lock.

    Raises:
        NotReady: the process ended, another one answers, it refuses the request, or time ran out.
        LockedError: somebody else took the lock over while the host was not reached.
        HostError: the host was not reached for two minutes.
    """
    watch = _Watch(deployment, host, supervisor, identity, api_key, tell, clock)
    deadline = watch.begun + (timeout_s or deployment.service.ready_timeout_s)
    pause_s = POLL_S
    reached = clock()
    while True:
        try:
            keep()
            watch.require_alive()
            ready = watch.try_completion(deadline - clock()) if watch.is_listening() else None
            reached = clock()
        except LockedError:
            raise
        except HostError:
            if clock() - reached > LONGEST_BREAK_S:
                raise
            ready = None
            watch.report_break()
        if ready:
            return ready
        if clock() >= deadline:
            raise NotReady(f"no completion within {deadline - watch.begun:g} s", watch.stage)
        time.sleep(min(pause_s, max(0.0, deadline - clock())))
        pause_s = min(SLOWEST_POLL_S, pause_s * 1.2)


class _Watch:
    """One wait: what is looked at, and what was seen last."""

    def __init__(
        self,
        deployment: Deployment,
        host: Host,
        supervisor: Supervisor,
        identity: ProcessIdentity,
        api_key: str | None,
        tell: Tell,
        clock: Callable[[], float],
    ) -> None:
        self._deployment, self._host, self._supervisor, self._identity = deployment, host, supervisor, identity
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tell, self._clock = tell, clock
        self._gpu: tuple[int, int] | None = None
        self._gpu_seen = float("-inf")
        self.begun = clock()
        self.stage = "starting"

    def report_break(self) -> None:
        """The host is not reached; what was seen last stays what it was."""
        self._tell(Progress(f"{self._host.name} is not reached, trying again", self._clock() - self.begun))

    def require_alive(self) -> None:
        """Raise unless the very process that was started runs."""
        state = self._supervisor.state()
        if state.identity == self._identity:
            return
        if state.identity is None:
            raise NotReady(f"the process ended while {self.stage}: {state.detail}", self.stage)
        raise NotReady(f"the process ended while {self.stage} and was started again ({state.detail})", self.stage)

    def is_listening(self) -> bool:
        """Whether the process holds the port; raises where somebody else does."""
        port = self._deployment.service.port
        holders = self._holders()
        if any(not one.is_ours for one in holders):
            time.sleep(POLL_S)
            holders = self._holders()  # a helper may have begun between the two looks that this takes
        if foreign := [one for one in holders if not one.is_ours]:
            raise NotReady(f"another process listens on {foreign[0].address} port {port}", self.stage)
        if not holders:
            self._report("loading", log_line=self._last_line())
        return bool(holders)

    def _holders(self) -> list[Listener]:
        service = self._deployment.service
        return [one for one in self._supervisor.listeners(service.port) if one.serves(service.address)]

    def try_completion(self, left_s: float) -> Ready | None:
        """Ask for a completion; None where the service says that it is not that far."""
        service = self._deployment.service
        try:
            with (
                self._host.reach(connect_address(self._deployment), service.port) as base_url,
                httpx.Client(base_url=base_url, headers=self._headers, trust_env=False, verify=False) as client,
            ):
                if self._deployment.engine.kind == "native":
                    if not self._says_ready(client):
                        return None
                    self._require_invocation(client)
                self._report("answering")
                response = self._ask(client, max(1.0, min(left_s, LONGEST_ANSWER_S)))
        except httpx.TimeoutException:
            self._report("answering, and not done yet")
            return None
        except (httpx.TransportError, HostError):
            self._report(self.stage)  # it listens but does not serve yet, or the tunnel broke: both are seen again
            return None
        if response is None:
            return None
        self.require_alive()
        if not self.is_listening():
            return None
        text, count = response
        return Ready(self._identity, self._clock() - self.begun, text, count)

    def _says_ready(self, client: httpx.Client) -> bool:
        answer = client.get("/ready", timeout=10)
        if answer.status_code == 200:
            return True
        try:
            told = answer.json()
            self._report(printable(str(told["stage"])[:80], keep=""), share=float(told["progress"]))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            self._report("loading")
        return False

    def _require_invocation(self, client: httpx.Client) -> None:
        """The process that answers bears the name that the supervisor gave this start, where both of them tell it."""
        own = self._identity.invocation
        try:
            answer = client.get("/server_info", timeout=10)
            told = answer.json()["process"]["invocation"] if answer.status_code == 200 else own
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if own and told != own:
            raise NotReady(
                f"another process answers: it bears invocation {str(told)[:64]}, and {own} was started", self.stage
            )

    def _ask(self, client: httpx.Client, timeout_s: float) -> tuple[str, int] | None:
        body = {
            "model": self._deployment.served_name,
            "prompt": "The capital of France is",
            "max_tokens": 8,
            "temperature": 0,
        }
        with client.stream("POST", "/v1/completions", json=body, timeout=httpx.Timeout(timeout_s)) as response:
            raw, deadline = b"", self._clock() + timeout_s
            for piece in response.iter_bytes():
                raw += piece
                if self._clock() > deadline:  # one that drips would reset every other time limit
                    raise httpx.ReadTimeout("it drips")
                if len(raw) > LARGEST_BODY_BYTES:
                    raise NotReady("its answer to a completion is larger than 1 MiB", self.stage)
        if response.status_code in (429, 503):
            self._report("listening, not ready")
            return None
        answer = _parsed(raw)
        if response.status_code != 200:
            raise NotReady(f"it refuses a completion: {response.status_code} {_message(answer, raw)}", self.stage)
        try:
            text, count = str(answer["choices"][0]["text"]), int(answer["usage"]["completion_tokens"])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            raise NotReady(f"its answer is no completion: {raw[:200]!r}", self.stage) from None
        if count < 1:
            raise NotReady("its completion holds no token", self.stage)
        return text, count

    def _last_line(self) -> str | None:
        lines = self._supervisor.tail(1, self._identity).strip().splitlines()
        return lines[-1][-160:] if lines else None

    def _report(self, stage: str, *, share: float | None = None, log_line: str | None = None) -> None:
        self.stage = stage
        now = self._clock()
        if now - self._gpu_seen >= GPU_POLL_S and self._deployment.runtime.device == "cuda":
            self._gpu_seen = now
            self._gpu = gpu_memory(self._host)
        used, total = self._gpu or (None, None)
        self._tell(Progress(stage, now - self.begun, used, total, share, log_line))


def gpu_memory(host: Host) -> tuple[int, int] | None:
    """Used and total memory of all GPUs in MiB; None where nvidia-smi tells nothing."""
    try:
        rows = [line.split(",") for line in host.run(_GPU_MEMORY).stdout.splitlines()]
        return (sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)) if rows else None
    except (ValueError, IndexError):
        return None


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _message(answer: Any, raw: bytes) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return " ".join(error["message"].split())[:200]
    return " ".join(raw[:200].decode(errors="replace").split())
