"""One verification: reach the server, run the probes, watch that one process answers throughout."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx

from ddtree.errors import UserError
from ddtree.verify.answer import Order
from ddtree.verify.baseline import Baseline, digest, load_baseline, save_baseline
from ddtree.verify.engines import detect
from ddtree.verify.engines.detect import WrongEngine
from ddtree.verify.expectation import Expectation
from ddtree.verify.finding import Finding, Status, Verdict, overall, proven, unknown, violated
from ddtree.verify.host_process import listening_process
from ddtree.verify.http_client import CheckFailed, Garbled, HttpClient, Hung, KeyRefused, Unreachable
from ddtree.verify.probes import PROBES
from ddtree.verify.prompts import echo_text, fresh_number
from ddtree.verify.session import Options, Session, Tell, first_line

_BACK_AGAIN_S = 15.0
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What comes of pages that have not the shape which their engine promises; adapters name the likely ones."""
_ONE_PROCESS = "one process answers throughout"


class Verification:
    """Holds a server to an expectation.

    Args:
        url: base address of the server.
        key: API key, shown to the server and to nobody else.
        is_strict: claims that cannot be checked count, also where nobody declared them.
        new_baseline: take this run as the baseline, whatever was measured before.
        name: what is verified, for people and baselines, where ``url`` is only this end of a tunnel to it.
        tell: told the probe that runs and the share of probes that are done.
    """

    def __init__(
        self,
        url: str,
        expectation: Expectation,
        options: Options = Options(),  # noqa: B008 - frozen
        *,
        key: str | None = None,
        is_strict: bool = False,
        new_baseline: bool = False,
        name: str | None = None,
        tell: Tell = lambda stage, fraction: None,
    ) -> None:
        self._url, self._expectation, self._options, self._key = url, expectation, options, key
        self._is_strict, self._new_baseline, self._tell = is_strict, new_baseline, tell
        self._name, self._is_tunnel = name or url, name is not None
        self._session: Session | None = None

    def run(self) -> Verdict:
        """All probes, whatever each of them finds; only a server that cannot be asked ends it early."""
        began = time.monotonic()
        self._session = None
        http = HttpClient(self._url, self._key)
        findings: list[Finding] = []
        try:
            findings.extend(self._findings(http))
        finally:
            http.close()
        session: Session | None = self._session
        status = overall(findings, self._is_strict)
        if session is not None and status is Status.proven and self._options.baseline:
            self._keep_baseline(session)
        return Verdict(
            self._name,
            session.effective.engine if session else None,
            tuple(findings),
            time.monotonic() - began,
            self._is_strict,
            session.measured if session else {},
        )

    def _findings(self, http: HttpClient) -> Iterator[Finding]:
        options = self._options
        self._tell("reaching the server", 0.0)
        claim = "the server can be asked"
        try:
            adapter = detect(
                http,
                self._expectation.engine,
                self._expectation.model_name,
                options.info_timeout_s,
                options.answer_timeout_s,
            )
            effective = adapter.effective()
        except WrongEngine as error:
            yield violated("reach", f"the engine is {self._expectation.engine}", str(error), remedy="declare what runs")
            return
        except CheckFailed as error:
            yield _not_asked(claim, error)
            return
        except _MALFORMED as error:
            yield _not_asked(claim, _garbled(error))
            return
        session = Session(adapter, effective, self._expectation, options)
        session.process = None if self._is_tunnel else listening_process(self._url)
        is_seen = session.process is not None and not session.process.is_ssh
        session.is_here = is_seen or (options.read is not None and not self._is_tunnel)
        if options.baseline and not self._new_baseline:
            session.baseline = load_baseline(self._name, adapter.model_name)
        self._session = session
        yield proven("reach", claim, f"{self._name} serves {adapter.model_name!r}")
        first = self._first_answer(session)
        yield first
        if first.status is Status.proven:
            yield from self._probes(session)

    def _first_answer(self, session: Session) -> Finding:
        """Whether one token comes at all; where it does not, nothing else can be found out."""
        claim = "a completion comes back"
        try:
            answer = session.adapter.answer(Order(echo_text(fresh_number()), 4))
        except Hung as error:
            return violated(
                "reach",
                claim,
                f"{first_line(error)}; {session.health()}",
                remedy="the engine hangs behind a server that lives: restart it; if it is only slow, raise --timeout",
            )
        except KeyRefused as error:
            return _not_asked(claim, error)
        except CheckFailed as error:
            return violated("reach", claim, first_line(error), remedy="look into the server's log")
        except _MALFORMED as error:
            return violated("reach", claim, first_line(_garbled(error)), remedy="look into the server's log")
        return proven("reach", claim, f"{answer.completion_tokens} tokens in {answer.seconds:.2f} s")

    def _probes(self, session: Session) -> Iterator[Finding]:
        before = _identity(session)
        for place, (name, (claim, probe)) in enumerate(PROBES.items()):
            self._tell(claim, place / len(PROBES))
            try:
                yield from probe(session)
            except Hung as error:
                yield violated(
                    name,
                    claim,
                    f"{first_line(error)}; {session.health()}",
                    remedy="the engine hangs: restart it, and look into its log; if it is only slow, raise --timeout",
                )
            except CheckFailed as error:
                yield unknown(name, claim, first_line(error), remedy="look into the server's log, and verify again")
            except _MALFORMED as error:
                yield unknown(name, claim, first_line(_garbled(error)), remedy="ask the engine itself, not a proxy")
            changed = self._changed(session, before, name)
            if changed is not None:
                yield changed
                return
        if before:
            yield proven("identity", _ONE_PROCESS, *(f"{name}: {value}" for name, value in before.items()))
        else:
            yield unknown(
                "identity",
                _ONE_PROCESS,
                f"{session.effective.engine} tells nothing that names its process",
                remedy="run verify on the server's machine, where the process can be seen",
                is_required=False,
            )

    def _changed(self, session: Session, before: dict[str, str], probe: str) -> Finding | None:
        """A finding where another process answers now, or none does."""
        deadline = time.monotonic() + _BACK_AGAIN_S
        while True:
            try:
                now = _identity(session)
                break
            except (CheckFailed, *_MALFORMED) as fault:
                error = fault if isinstance(fault, CheckFailed) else _garbled(fault)
                if time.monotonic() > deadline:
                    return violated(
                        "identity",
                        _ONE_PROCESS,
                        f"the server went away during the probe {probe!r} and is not back: {first_line(error)}",
                        remedy="look into its log for the cause of its end",
                    )
                time.sleep(0.5)
        apart = [name for name in before.keys() & now.keys() if before[name] != now[name]]
        if not apart:
            return None
        return violated(
            "identity",
            _ONE_PROCESS,
            *(f"{name} was {before[name]} and is {now[name]} after the probe {probe!r}" for name in sorted(apart)),
            remedy="the server was started again, or several answer behind one address: verify each by itself, "
            "once it has settled",
        )

    def _keep_baseline(self, session: Session) -> None:
        """The first proven run stays the yardstick, so that a slow decline cannot hide in many small steps."""
        settings_digest = digest(session.effective.settings, session.effective.version)
        old = session.baseline
        if old is not None and old.settings_digest == settings_digest:
            return
        save_baseline(
            Baseline(
                self._name,
                session.adapter.model_name,
                settings_digest,
                session.measured.get("decode_tok_s"),
                session.fingerprint,
                session.prompt_tokens,
                time.time(),
            )
        )


def _identity(session: Session) -> dict[str, str]:
    """What names the process: its own account, and this machine's."""
    found = session.adapter.identity()
    if session.process is not None:
        now = listening_process(session.adapter.http.url)
        found["process on this machine"] = now.identity if now else "none"
    return found


def _garbled(error: Exception) -> Garbled:
    return Garbled(f"the server's pages have not the shape that is promised ({type(error).__name__}: {error})")


def _not_asked(claim: str, error: CheckFailed) -> Finding:
    if isinstance(error, KeyRefused):
        remedy = "give a key of this server with --api-key-file FILE"
    elif isinstance(error, Unreachable):
        remedy = "start the server, or correct the address"
    elif isinstance(error, Hung):
        remedy = "wait until the server is up; raise --timeout where it is only slow"
    else:
        remedy = "give the address of ddtree serve, SGLang or vLLM"
    return unknown("reach", claim, first_line(error), remedy=remedy)


def checked_url(url: str) -> str:
    """A base address that requests can be sent to.

    Raises:
        UserError: it is none.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url[:100]!r} is no address ({error})", "write http://HOST:PORT") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url[:100]!r} is no address of a server", "write http://HOST:PORT, or name a .toml file")
    if parsed.userinfo:
        raise UserError("the address holds a password", "give the key with --api-key-file FILE")
    if parsed.query or parsed.fragment or parsed.path.rstrip("/") not in ("", "/v1"):
        raise UserError(f"{url[:100]!r} has a path", "write http://HOST:PORT alone")
    return str(parsed.copy_with(path="/")).rstrip("/")
