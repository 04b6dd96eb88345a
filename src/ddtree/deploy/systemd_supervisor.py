"""systemd as the supervisor: one unit below /etc/systemd/system."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree.deploy.host import Completed, Host, HostError
from ddtree.deploy.listeners import Listener, find_listeners
from ddtree.deploy.render import SECRETS_FOLDER, Rendered
from ddtree.deploy.supervisor import ProcessIdentity, ServiceState
from ddtree.deploy.unit import HEADER
from ddtree.plain_text import printable

UNIT_FOLDER = "/etc/systemd/system"
_PROPERTIES = (
    "LoadState ActiveState SubState MainPID InvocationID NRestarts Result ExecMainStatus FragmentPath DropInPaths "
    "ControlGroup UnitFileState NeedDaemonReload"
)
# After the unit's properties: when its main process began. In `stat`, what precedes the last ')' is the program's name.
_SHOW = """
properties=$(systemctl show "$1" --property="$2") || exit 1
printf '%s\\n' "$properties"
pid=$(printf '%s\\n' "$properties" | sed -n 's/^MainPID=//p')
if [ "${pid:-0}" -gt 0 ] && read -r line <"/proc/$pid/stat"; then
    set -- ${line##*) }
    echo "Started=$(cat /proc/sys/kernel/random/boot_id):${20}"
fi
"""
_PIDS = """
for root in /sys/fs/cgroup /sys/fs/cgroup/systemd; do
    [ -r "$root$1/cgroup.procs" ] && exec cat "$root$1/cgroup.procs"
done
exit 0
"""
# Of one process: what it wrote itself, and what systemd wrote of it.
_JOURNAL = """
if [ -n "$3" ]; then set -- "$2" "_SYSTEMD_INVOCATION_ID=$3" + "INVOCATION_ID=$3"; else set -- "$2" -u "$1"; fi
journalctl -n "$@" -o short-iso --no-pager -q
"""


class SystemdSupervisor:
    """The unit ``name``.service on ``host``."""

    def __init__(self, host: Host, name: str, log_file: str | None = None) -> None:
        self._host, self._name, self._log_file = host, name, log_file
        self._unit = f"{name}.service"
        self._path = f"{UNIT_FOLDER}/{self._unit}"
        if host.run("[ -d /run/systemd/system ]").exit_code:
            raise HostError(f"{host.name} does not run systemd", 'set service.supervisor = "process"')

    @property
    def state_folder(self) -> str:
        return f"/var/lib/ddtree/deploy/{self._name}"

    @property
    def secrets_folder(self) -> str:
        return f"{SECRETS_FOLDER}/{self._name}"

    def secret_path(self, path: str) -> str:
        return path

    def refuse_foreign(self) -> None:
        shown = self._show()
        place = shown.get("FragmentPath", "")
        if shown.get("LoadState") == "masked":
            raise HostError(f"{self._unit} is masked on {self._host.name}", f"systemctl unmask {self._unit}")
        if place and place != self._path:
            raise HostError(f"{self._host.name} has a {self._unit} of its own, {place}", "choose another service.name")
        text = self.installed()
        if text is not None and not text.startswith(HEADER):
            raise HostError(
                f"{self._path} on {self._host.name} was not written by ddtree", "move it away, or choose another name"
            )
        if shown.get("DropInPaths"):
            raise HostError(
                f"{self._unit} on {self._host.name} is changed by {shown['DropInPaths']}",
                f"move that into the deployment file, then: systemctl revert {self._unit}",
            )

    def install(self, rendered: Rendered) -> None:
        assert rendered.unit is not None
        self._host.write(self._path, rendered.unit.encode(), mode=0o644, privileged=True)
        self._do("daemon-reload")
        self._do("enable" if "[Install]" in rendered.unit.splitlines() else "disable", self._unit)

    def remove(self) -> None:
        self._do("disable", self._unit)
        self._host.run('rm -f -- "$1"', self._path, privileged=True)
        self._do("daemon-reload")
        self._host.run('systemctl reset-failed "$1" 2>/dev/null', self._unit, privileged=True)

    def start(self) -> ProcessIdentity:
        # Starts are counted against the limit for those that fail; a sweep starts often and on purpose.
        self._host.run('systemctl reset-failed "$1" 2>/dev/null', self._unit, privileged=True)
        before = self.state().identity
        told = self._host.run('systemctl restart "$1"', self._unit, privileged=True, timeout_s=600)
        state = self.state()
        if not told.exit_code and before and state.identity and state.identity.invocation == before.invocation:
            raise HostError(
                f"{self._unit} was not started anew: systemd still tells invocation {before.invocation}",
                f"see: systemctl status {self._unit}",
            )
        if told.exit_code or state.identity is None:
            raise HostError(
                f"{self._unit} did not start ({state.detail or told.trouble})", f"see: journalctl -u {self._unit}"
            )
        return state.identity

    def stop(self) -> None:
        if self.state().status != "absent":
            self._do("stop", self._unit, timeout_s=600)

    def state(self) -> ServiceState:
        shown = self._show()
        if shown.get("LoadState") == "not-found":
            return ServiceState("absent")
        pid = int(shown.get("MainPID") or 0)
        identity = ProcessIdentity(pid, shown.get("Started", ""), shown.get("InvocationID", "")) if pid else None
        active, result = shown.get("ActiveState", ""), shown.get("Result", "")
        detail = f"{active} ({shown.get('SubState', '')})"
        if result not in ("", "success"):
            detail += f", {result}, exit status {shown.get('ExecMainStatus', '?')}"
        restarts = int(shown.get("NRestarts") or 0)
        if active == "active" and identity:
            return ServiceState("running", identity, detail, restarts)
        if active in ("activating", "reloading"):
            return ServiceState("starting", identity, detail, restarts)
        return ServiceState("failed" if active == "failed" else "stopped", identity, detail, restarts)

    def listeners(self, port: int) -> tuple[Listener, ...]:
        group = self._show().get("ControlGroup", "")
        pids = self._host.run(_PIDS, group, privileged=True).stdout.split() if group else []
        return find_listeners(self._host, port, tuple(int(pid) for pid in pids), privileged=True)

    def installed(self) -> str | None:
        content = self._host.read(self._path, privileged=True)
        return None if content is None else content.decode(errors="replace")

    def told(self, rendered: Rendered) -> str:
        return rendered.unit or ""

    def tail(self, lines: int, identity: ProcessIdentity | None = None) -> str:
        if self._log_file:
            told = self._host.run('tail -n "$1" -- "$2"', str(lines), self._log_file, privileged=True)
            return printable(told.stdout)
        told = self._host.run(
            _JOURNAL, self._unit, str(lines), identity.invocation if identity else "", privileged=True
        )
        return printable(told.stdout if not told.exit_code else f"(no journal: {told.trouble})\n")

    def follow(self) -> Iterator[str]:
        if self._log_file:
            lines = self._host.stream('exec tail -n 50 -F -- "$1"', self._log_file, privileged=True)
        else:
            script = 'exec journalctl -u "$1" -n 50 -f -o short-iso --no-pager -q'
            lines = self._host.stream(script, self._unit, privileged=True)
        yield from map(printable, lines)

    def _show(self) -> dict[str, str]:
        told = self._host.run(_SHOW, self._unit, _PROPERTIES.replace(" ", ","))
        if told.exit_code:
            raise HostError(f"systemd on {self._host.name} does not answer ({told.trouble})", "look after it")
        return dict(line.split("=", 1) for line in told.stdout.splitlines() if "=" in line)

    def _do(self, *verb: str, timeout_s: float = 60.0) -> Completed:
        told = self._host.run('systemctl -q "$@"', *verb, privileged=True, timeout_s=timeout_s)
        if told.exit_code:
            raise HostError(f"systemctl {' '.join(verb)} failed on {self._host.name} ({told.trouble})", "look after it")
        return told
