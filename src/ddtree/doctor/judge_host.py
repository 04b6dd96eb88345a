"""The machine around the GPUs: memory, disk, port, rights, limits, clock."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddtree.doctor.condition import Condition, fault, good, hint, unknown
from ddtree.doctor.needs import Needs
from ddtree.doctor.recording import Recording

_LEAST_RAM = 16 << 30
_OPEN_FILES = 65536


def judge_host(recording: Recording, needs: Needs) -> Iterator[Condition]:
    """What does not hang on GPUs."""
    yield from _memory(recording, needs)
    yield from _disk(recording, needs)
    if needs.port is not None:
        yield _port(recording, needs.port)
    yield from _systemd(recording, needs)
    yield _clock(recording)
    yield from _limits(recording)


def _memory(recording: Recording, needs: Needs) -> Iterator[Condition]:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", recording["meminfo"].text, re.MULTILINE))
    if "MemAvailable" not in found:
        yield unknown("host", "there is memory enough", "/proc/meminfo tells nothing")
        return
    free, total = int(found["MemAvailable"]) << 10, int(found.get("MemTotal", 0)) << 10
    words = f"{free / 1e9:.0f} GB of {total / 1e9:.0f} GB are free"
    weights = needs.weights_bytes or 0
    what = "there is memory enough to load the model" if weights else "there is memory enough"
    if needs.on_gpu is False and weights and free < 1.3 * weights:
        yield fault("host", what, f"{words}, the weights alone have {weights / 1e9:.0f} GB", "take a smaller model")
    elif needs.on_gpu and free < _LEAST_RAM:
        yield fault("host", what, words, "16 GB are the least for an engine's processes and pinned buffers")
    elif weights and free < weights:
        remedy = "it loads, but each start reads the disk anew: the page cache cannot hold the weights"
        yield hint("host", what, f"{words}, the weights have {weights / 1e9:.0f} GB", remedy)
    else:
        yield good("host", what, words)


def _disk(recording: Recording, needs: Needs) -> Iterator[Condition]:
    line = recording["disk"].text.splitlines()[-1:] if recording["disk"].is_good else []
    fields = line[0].split() if line else []
    if len(fields) < 6 or not fields[3].isdigit():
        yield unknown("host", "there is disk enough", "df tells nothing")
        return
    free, mount = int(fields[3]), " ".join(fields[5:])
    words = f"{free / 1e9:.0f} GB are free at {mount}"
    if needs.weights_bytes and not needs.is_fetched and free < 1.05 * needs.weights_bytes:
        words = f"{words}, the weights have {needs.weights_bytes / 1e9:.0f} GB"
        yield fault(
            "host", "there is disk enough for the model", words, "free some, or name another folder with --disk"
        )
    else:
        yield good("host", "there is disk enough" + (" for the model" if needs.weights_bytes else ""), words)


def _port(recording: Recording, port: int) -> Condition:
    what = f"port {port} is free"
    if not recording["tcp"].is_good:
        return unknown("host", what, "/proc/net/tcp cannot be read")
    for table in ("tcp", "tcp6"):
        for line in recording[table].text.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                remedy = "right if it is the service that shall be replaced; else choose another port"
                return hint("host", what, "somebody listens on it", remedy)
    return good("host", what)


def _systemd(recording: Recording, needs: Needs) -> Iterator[Condition]:
    state = (recording["systemd"].text.split() or ["not there"])[0]
    is_there = state in ("running", "degraded", "starting")
    if not is_there:
        grade = fault if needs.needs_systemd else hint
        remedy = 'deploy with service.supervisor = "process"'
        yield grade("host", "systemd runs this machine", f"it is {state}", remedy)
        return
    yield good("host", "systemd runs this machine", state)
    what = "units can be written"
    if recording["user"].text.strip() == "0":
        yield good("host", what, "this user is root")
    elif recording["sudo"].is_good:
        yield good("host", what, "sudo asks no password")
    else:
        grade = fault if needs.needs_systemd else hint
        remedy = 'allow sudo without a password, or deploy as root, or with service.supervisor = "process"'
        yield grade("host", what, "this user is not root, and sudo asks a password", remedy)


def _clock(recording: Recording) -> Condition:
    what = "the clock is set by the network"
    if not recording["clock"].is_good:
        return unknown("host", what, "timedatectl tells nothing")
    if "NTPSynchronized=yes" in recording["clock"].text:
        return good("host", what)
    remedy = "timedatectl set-ntp true: results, logs and TLS hang on it"
    return hint("host", what, "it is not synchronised", remedy)


def _limits(recording: Recording) -> Iterator[Condition]:
    found = re.search(r"^Max open files\s+(\d+|unlimited)", recording["limits"].text, re.MULTILINE)
    if found and found[1] != "unlimited" and int(found[1]) < _OPEN_FILES:
        yield hint(
            "host",
            "enough files may be open",
            f"the limit of this shell is {found[1]}",
            "rendered units set their own; by hand: ulimit -n 1048576",
        )
