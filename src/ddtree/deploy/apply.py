"""From a deployment file to a service that has answered, or back to the one before."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import ddtree
from ddtree.deploy.deployment import Deployment
from ddtree.deploy.host import Host, HostError, Lock, LockedError
from ddtree.deploy.preflight import check_host
from ddtree.deploy.progress import Progress, Tell, quiet
from ddtree.deploy.ready import Ready, await_ready
from ddtree.deploy.release import Release
from ddtree.deploy.render import Rendered, render
from ddtree.deploy.secret_swap import SecretSwap, bring_back
from ddtree.deploy.site import Site, deployer, open_site
from ddtree.deploy.supervisor import ProcessIdentity, ServiceState
from ddtree.errors import UserError

TAIL_LINES = 40


@dataclass(frozen=True)
class Applied:
    """A deployment that answers.

    Attributes:
        release: as it is now recorded on the host.
        ready: the first completion, and the process that gave it.
        replaced: the release that ran before, if any.
    """

    release: Release
    ready: Ready
    replaced: Release | None


class ApplyError(Exception):
    """A deployment did not come to answer; the host was brought back.

    Attributes:
        reason: in one line.
        tail: the end of the failed service's log.
        release: the failed one, as recorded.
        back_to: the good release that runs again; None if there was none, and the service was taken out.
        back_trouble: why going back failed; None if it worked.
        left_stopped: the service was stopped before, and is stopped again.
    """

    def __init__(
        self,
        reason: str,
        tail: str,
        release: Release,
        back_to: Release | None,
        back_trouble: str | None,
        left_stopped: bool,
    ) -> None:
        super().__init__(reason)
        self.reason, self.tail, self.release = reason, tail, release
        self.back_to, self.back_trouble, self.left_stopped = back_to, back_trouble, left_stopped


def apply(
    deployment: Deployment,
    *,
    host: Host | None = None,
    note: str = "",
    timeout_s: float | None = None,
    tell: Tell = quiet,
) -> Applied:
    """Put a deployment in place, start it, and wait until it answered.

    Args:
        host: an open host to use; opened from the deployment if left out.
        note: kept with the release.
        timeout_s: longest wait for the first completion; the deployment's own if left out.

    Raises:
        UserError: the deployment, the host or another apply speaks against it: nothing was changed.
        ApplyError: it was tried, failed, and was taken back.
    """
    rendered = render(deployment)
    with open_site(deployment, host) as site:
        secrets = SecretSwap(site.host, site.supervisor, rendered.secret_files)
        tell(Progress(f"looking at {site.host.name}"))
        with site.locked() as lock:
            check_host(deployment, rendered, site.host, site.supervisor)
            return _swap(site, rendered, secrets, note, _Wait(timeout_s, tell, lock))


def rollback(
    deployment: Deployment,
    *,
    to: int | None = None,
    host: Host | None = None,
    timeout_s: float | None = None,
    tell: Tell = quiet,
) -> Applied:
    """Go back to an earlier release, as it was rendered then, with the secrets that are on the host now.

    Args:
        deployment: names host and service; the rest comes from the release.
        to: its number. If left out: the good one before the newest good one; or the newest good one, where a later
            apply was broken off or nothing runs.

    Raises:
        UserError: there is no such release, or the host speaks against it: nothing was changed.
        ApplyError: it was tried, failed, and was taken back.
    """
    with open_site(deployment, host) as site, site.locked() as lock:
        release = _target(site, to)
        then = site.releases.deployment(release)
        rendered = site.releases.rendered(release)
        _require_same_place(deployment, then, release)
        if site.releases.all()[-1].state == "applying":
            bring_back(site.host, site.supervisor.secrets_folder)
        _require_secrets(site, rendered, release)
        check_host(then, rendered, site.host, site.supervisor)
        back = Site(then, site.host, site.supervisor, site.releases)
        nothing_new = SecretSwap(site.host, site.supervisor, ())
        return _swap(back, rendered, nothing_new, f"rollback to {release.number}", _Wait(timeout_s, tell, lock))


def stop(deployment: Deployment, *, host: Host | None = None) -> ServiceState:
    """Stop the service and leave it in place, until it is applied again or the host boots.

    Raises:
        UserError: somebody changes it right now.
    """
    with open_site(deployment, host) as site, site.locked():
        site.supervisor.stop()
        return site.supervisor.state()


def history(deployment: Deployment, *, host: Host | None = None) -> list[Release]:
    """The releases on the host, oldest first."""
    with open_site(deployment, host) as site:
        return site.releases.all()


@dataclass(frozen=True)
class _Wait:
    """How to wait for a completion."""

    timeout_s: float | None
    tell: Tell
    lock: Lock

    def ready(self, site: Site, rendered: Rendered, identity: ProcessIdentity) -> Ready:
        """Wait for the first completion, with the key that is on the host."""
        api_key = None
        for file in rendered.secret_files:
            content = site.host.read(site.supervisor.secret_path(file.path), privileged=True)
            api_key = api_key or file.key_in(content or b"")
        return await_ready(
            site.deployment,
            site.host,
            site.supervisor,
            identity,
            api_key=api_key,
            timeout_s=self.timeout_s,
            tell=self.tell,
            keep=self.lock.keep,
        )


def _swap(site: Site, rendered: Rendered, secrets: SecretSwap, note: str, wait: _Wait) -> Applied:
    """Install, start, await; on any failure bring back what was there. The lock is held."""
    before = site.releases.last_good()
    was_stopped = site.supervisor.state().status == "stopped"
    release = _begin(site, rendered, note)
    identity = None
    try:
        secrets.put()
        site.supervisor.install(rendered)
        wait.tell(Progress("starting", 0.0))
        identity = site.supervisor.start()
        ready = wait.ready(site, rendered, identity)
    except LockedError:
        raise  # the connection broke, and the service is in other hands now
    except (Exception, KeyboardInterrupt) as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        wait.tell(Progress(f"failed: {reason}"))
        raise _Failed(site, release, identity, reason).taken_back(secrets, before, was_stopped, wait) from error
    secrets.keep()
    release = site.releases.finish(release, "good", ready_s=round(ready.waited_s, 2), identity=ready.identity)
    site.releases.forget_old()
    return Applied(release, ready, before)


def _begin(site: Site, rendered: Rendered, note: str) -> Release:
    every = site.releases.all()
    release = Release(
        number=every[-1].number + 1 if every else 1,
        state="applying",
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        by=deployer(),
        ddtree=ddtree.__version__,
        digest=rendered.digest,
        note=note,
    )
    site.releases.begin(release, site.deployment, rendered)
    return release


@dataclass(frozen=True)
class _Failed:
    """A release that did not come to answer."""

    site: Site
    release: Release
    identity: ProcessIdentity | None
    reason: str

    def taken_back(self, secrets: SecretSwap, before: Release | None, was_stopped: bool, wait: _Wait) -> ApplyError:
        """Bring back what was there; tells how that went."""
        site, tail, trouble, release = self.site, "", None, self.release
        try:
            tail = site.supervisor.tail(TAIL_LINES, self.identity)
            secrets.back()
            if before is None or was_stopped:
                site.supervisor.stop()
            if before is None:
                site.supervisor.remove()
            else:
                self._return_to(before, was_stopped, wait)
        except Exception as fault:
            trouble = str(fault) or type(fault).__name__
        with contextlib.suppress(HostError):
            release = site.releases.finish(release, "failed", note=self.reason)
        return ApplyError(self.reason, tail, release, before, trouble, was_stopped)

    def _return_to(self, before: Release, was_stopped: bool, wait: _Wait) -> None:
        rendered = self.site.releases.rendered(before)
        self.site.supervisor.install(rendered)
        if was_stopped:
            return
        wait.tell(Progress(f"going back to release {before.number}", 0.0))
        then = replace(self.site, deployment=self.site.releases.deployment(before))
        identity = then.supervisor.start()
        patient = replace(wait, timeout_s=None)  # its own, however short the new one's was
        ready = patient.ready(then, rendered, identity)
        then.releases.finish(before, "good", identity=ready.identity)


def _target(site: Site, to: int | None) -> Release:
    every = site.releases.all()
    if to is not None:
        found = next((one for one in every if one.number == to), None)
        if found is None:
            raise UserError(f"there is no release {to} on {site.host.name}", "see: ddtree deploy history")
        if found.state != "good":
            raise UserError(f"release {to} never answered", "choose one that is good: ddtree deploy history")
        return found
    good = [one for one in every if one.state == "good"]
    runs = site.supervisor.state().status == "running"
    if good and (every[-1].state == "applying" or not runs):
        return good[-1]  # an apply was broken off, or going back failed: the last one that answered
    if len(good) < 2:
        raise UserError(f"there is no earlier good release on {site.host.name}", "see: ddtree deploy history")
    return good[-2]


def _require_same_place(now: Deployment, then: Deployment, release: Release) -> None:
    if (now.name, now.service.supervisor) != (then.name, then.service.supervisor):
        raise UserError(f"release {release.number} is of another service", "name that service's deployment file")


def _require_secrets(site: Site, rendered: Rendered, release: Release) -> None:
    for file in rendered.secret_files:
        path = site.supervisor.secret_path(file.path)
        if site.host.run('[ -f "$1" ]', path, privileged=True).exit_code:
            raise HostError(f"release {release.number} needs {path}, which is gone", "apply its deployment file anew")
