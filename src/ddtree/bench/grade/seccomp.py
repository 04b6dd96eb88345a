"""The filter of system calls that a box's programs run under, as the kernel takes it (seccomp, classic BPF).

Limits of a process do not count System V memory, memory files and what is mounted in a namespace of one's own. A
program has no use for them, nor for what else is refused here, each a wide door to the kernel: it is not permitted.
"""

from __future__ import annotations

import platform
import struct

from ddtree.errors import UserError

# Names with their numbers on x86_64 and aarch64, from the kernel's tables of system calls.
_REFUSED = """
shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, memfd_create 319 279, memfd_secret 447 447,
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
mount_setattr 442 442, ptrace 101 117, add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280,
perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427
"""
_MACHINES = ("x86_64", "aarch64")
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000
# A step: what it does, how many steps it passes over if so and if not, and with what.
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_LOAD, _IS, _IS_AT_LEAST, _HAS_ANY, _END = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _NOT_PERMITTED, _NOT_THERE = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter for a kind of processor, this one's if None.

    Raises:
        UserError: its system calls are not known here.
    """
    machine = (machine or platform.machine()).replace("AMD64", "x86_64").replace("arm64", "aarch64")
    if machine not in _MACHINES:
        raise UserError(f"the box's filter of system calls knows no {machine}", "grade on x86_64 or aarch64")
    steps = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IS, 1, 0, _ARCHITECTURE[machine]), (_END, 0, 0, _KILL)]
    steps.append((_LOAD, 0, 0, _NUMBER_AT))
    if machine == "x86_64":
        steps += [(_IS_AT_LEAST, 0, 1, _X32), (_END, 0, 0, _NOT_PERMITTED)]
    for call in _REFUSED.split(","):
        number = int(call.split()[1 + _MACHINES.index(machine)])
        steps += [(_IS, 0, 1, number), (_END, 0, 0, _NOT_PERMITTED)]
    steps += [(_IS, 0, 1, _CLONE3), (_END, 0, 0, _NOT_THERE)]  # its flags lie in memory; libraries then take clone
    steps += [(_IS, 0, 4, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    steps += [(_HAS_ANY, 0, 1, _NEW_NAMESPACES), (_END, 0, 0, _NOT_PERMITTED), (_END, 0, 0, _ALLOW)]
    steps.append((_END, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
