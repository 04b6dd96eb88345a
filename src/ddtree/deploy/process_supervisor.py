"""A plain process as the service, for machines without systemd: it outlives the command that started it, no more."""

from __future__ import annotations

import json
import shlex
import time
import uuid
from collections.abc import Iterator

from ddtree.deploy.host import Host, HostError
from ddtree.deploy.listeners import Listener, find_listeners
from ddtree.deploy.render import Rendered
from ddtree.deploy.supervisor import ProcessIdentity, ServiceState
from ddtree.plain_text import printable

HEADER = "# Rendered by ddtree: change the deployment file, not this."

# Functions for all scripts here: `began PID` prints when a process began, or nothing; `members SESSION` its processes.
_PROCESSES = """
began() {
    if [ -d /proc/self ]; then
        read -r line <"/proc/$1/stat" || return 1
        set -- ${line##*) }
        [ "$1" = Z ] && return 1
        echo "$(cat /proc/sys/kernel/random/boot_id):${20}"
    else
        ps -o lstart= -p "$1" | tr -s ' ' '_' | sed 's/_*$//'
    fi
} 2>/dev/null
members() {
    if [ -d /proc/self ]; then
        for stat in /proc/[0-9]*/stat; do
            read -r line <"$stat" || continue
            pid=${line%% *}
            set -- "$1" ${line##*) }
            [ "$5" = "$1" ] && [ "$2" != Z ] && echo "$pid"
        done
    else
        ps -axo pid=,pgid= | while read -r pid group; do [ "$group" = "$1" ] && echo "$pid"; done
    fi
    return 0
} 2>/dev/null
"""
# A session of its own, so that it outlives this one and all its processes can be told. The pid is written by the
# process itself, before it becomes the service.
_START = (
    _PROCESSES
    + r"""
umask 077
cd -- "$1" || exit 1
log=${3:-service.log}
if [ -z "$3" ] && [ -s service.log ]; then mv -f service.log service.log.1; fi
touch -- "$log" || exit 1
rm -f pid
export INVOCATION_ID="$2"
inner='echo $$ >pid.new && mv pid.new pid && exec sh ./launch.sh'
if command -v setsid >/dev/null; then
    setsid sh -c "$inner" </dev/null >>"$log" 2>&1 &
else
    python3 -c 'import os, sys; os.setsid(); os.execvp("sh", ["sh", "-c", sys.argv[1]])' "$inner" \
        </dev/null >>"$log" 2>&1 &
fi
tries=0
while [ ! -s pid ]; do
    tries=$((tries + 1))
    [ $tries -gt 100 ] && { echo "it wrote no pid" >&2; exit 1; }
    sleep 0.1
done
pid=$(cat pid)
printf '{"pid": %d, "started": "%s", "invocation": "%s"}\n' "$pid" "$(began "$pid")" "$2" >identity.new
mv identity.new identity.json
cat identity.json
"""
)
# Prints absent, stopped, ended or running, then the recorded identity, then the processes of its session. The record is
# read once, as a stop may take it away meanwhile.
_LOOK = (
    _PROCESSES
    + r"""
cd -- "$1" 2>/dev/null && [ -f launch.sh ] || { echo absent; exit 0; }
identity=$(cat identity.json 2>/dev/null)
[ -n "$identity" ] || { echo stopped; exit 0; }
pid=$(printf '%s' "$identity" | sed -n 's/.*"pid": \([0-9]*\).*/\1/p')
started=$(printf '%s' "$identity" | sed -n 's/.*"started": "\([^"]*\)".*/\1/p')
if [ -n "$started" ] && [ "$(began "$pid")" = "$started" ]; then echo running; else echo ended; fi
printf '%s\n' "$identity"
members "$pid"
"""
)
_END = _PROCESSES + '[ -n "$2" ] && [ "$(began "$1")" = "$2" ] && kill -s TERM "$1"'
# Helpers that did not end with it. Its number may be somebody else's by now: only those of this start are ended.
_END_REST = (
    _PROCESSES
    + """
members "$1" | while read -r pid; do
    if [ "$3" = all ] || tr '\\0' '\\n' <"/proc/$pid/environ" | grep -qx "INVOCATION_ID=$2"; then
        kill -s KILL "$pid"
    fi
done 2>/dev/null
cd -- "$4" && rm -f pid identity.json
"""
)
_HOME = 'printf "%s" "${XDG_STATE_HOME:-$HOME/.local/state}/ddtree"'


class ProcessSupervisor:
    """The process ``name`` of the user who deploys on ``host``."""

    def __init__(self, host: Host, name: str, log_file: str | None = None, stop_timeout_s: float = 60.0) -> None:
        self._host, self._name, self._log_file, self._stop_timeout_s = host, name, log_file, stop_timeout_s
        folder = host.run(_HOME).stdout
        if not folder.startswith("/"):
            raise HostError(f"no home folder on {host.name} to keep the service in", "set XDG_STATE_HOME there")
        self._folder = f"{folder}/{name}"

    @property
    def state_folder(self) -> str:
        return self._folder

    @property
    def secrets_folder(self) -> str:
        return f"{self._folder}/secrets"

    def secret_path(self, path: str) -> str:
        return f"{self._folder}/{path}"

    def refuse_foreign(self) -> None:
        """The folder is ddtree's own: nobody else's service can be in it."""

    def install(self, rendered: Rendered) -> None:
        self._host.write(f"{self._folder}/launch.sh", self.told(rendered).encode(), mode=0o600)

    def remove(self) -> None:
        self._host.run('cd -- "$1" && rm -f launch.sh pid identity.json', self._folder)

    def start(self) -> ProcessIdentity:
        self.stop()
        told = self._host.run(_START, self._folder, uuid.uuid4().hex, self._log_file or "")
        if told.exit_code:
            raise HostError(f"{self._name} did not start on {self._host.name} ({told.trouble})", "see its log")
        return ProcessIdentity(**json.loads(told.stdout))

    def stop(self) -> None:
        _, identity, _ = self._look()
        if identity is None:
            return
        ended_now = self._host.run(_END, str(identity.pid), identity.started).exit_code == 0
        deadline = time.monotonic() + self._stop_timeout_s
        while ended_now and self._look()[0] == "running" and time.monotonic() < deadline:
            time.sleep(0.1)
        whose = "all" if ended_now else "marked"
        self._host.run(_END_REST, str(identity.pid), identity.invocation, whose, self._folder)

    def state(self) -> ServiceState:
        word, identity, _ = self._look()
        if word == "running" and identity:
            return ServiceState("running", identity, f"process {identity.pid}")
        if word == "ended" and identity:
            return ServiceState("failed", None, f"process {identity.pid} ended by itself")
        return ServiceState("absent" if word == "absent" else "stopped", None, "not running")

    def listeners(self, port: int) -> tuple[Listener, ...]:
        word, _, pids = self._look()
        return find_listeners(self._host, port, pids if word == "running" else (), privileged=False)

    def installed(self) -> str | None:
        content = self._host.read(f"{self._folder}/launch.sh")
        return None if content is None else content.decode(errors="replace")

    def told(self, rendered: Rendered) -> str:
        lines = ["#!/bin/sh", HEADER, "umask 077"]
        lines += [f". ./{file.path}" for file in rendered.secret_files if file.form == "shell_environment"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in rendered.environment.items()]
        lines += [f"exec {shlex.join(rendered.command)}"]
        return "\n".join(lines) + "\n"

    def tail(self, lines: int, identity: ProcessIdentity | None = None) -> str:
        return printable(self._host.run('tail -n "$1" -- "$2"', str(lines), self._log()).stdout)

    def follow(self) -> Iterator[str]:
        yield from map(printable, self._host.stream('exec tail -n 50 -F -- "$1"', self._log()))

    def _log(self) -> str:
        return self._log_file or f"{self._folder}/service.log"

    def _look(self) -> tuple[str, ProcessIdentity | None, tuple[int, ...]]:
        """How it is, in one word; the process that was started last; and the processes of its session."""
        told = self._host.run(_LOOK, self._folder)
        word, *rest = told.stdout.splitlines() or [""]
        if told.exit_code or not word:
            raise HostError(f"{self._host.name} does not tell of its processes ({told.trouble})", "look after it")
        if not rest:
            return word, None, ()
        try:
            identity = ProcessIdentity(**json.loads(rest[0]))
        except (ValueError, TypeError):
            raise HostError(f"{self._folder}/identity.json on {self._host.name} is broken", "stop it by hand") from None
        return word, identity, tuple(int(pid) for pid in rest[1:])
