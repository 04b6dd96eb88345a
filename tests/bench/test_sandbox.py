"""Programs that do harm: what they try does not happen, and the machine is as before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ddtree.bench.grade import sandbox as module
from ddtree.bench.grade.sandbox import Limits, Sandbox, find_sandbox
from ddtree.bench.grade.seccomp import seccomp_filter
from ddtree.errors import UserError


@pytest.fixture(scope="module")
def box():
    try:
        return find_sandbox(Limits(wall_s=3.0, cpu_s=2), is_unsafe=False)
    except UserError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def nothing_left():
    told = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return not [line for line in told.splitlines() if "RLIMIT_" in line and "python" in line]


def test_an_honest_program_passes(box):
    assert box.run("import math, json, re, collections\nassert math.gcd(4, 6) == 2\nprint('x' * 10**6)").how == "passed"
    assert box.isolation == "bubblewrap"


def test_a_wrong_program_fails_with_its_words(box):
    found = box.run("assert 1 == 2, 'one is not two'")
    assert found.how == "failed" and "AssertionError: one is not two" in found.detail


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
        "import subprocess, sys\nwhile True: subprocess.Popen([sys.executable, '-c', 'while True: pass'])",
    ],
)
def test_fork_bomb(box, program):
    began = time.monotonic()
    assert box.run(program).how != "passed"
    assert time.monotonic() - began < 20
    assert nothing_left()


def test_endless_loop(box):
    assert box.run("while True: pass").how in ("timeout", "failed")
    assert box.run("import time\ntime.sleep(60)").how == "timeout"
    assert nothing_left()


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(10 * 2**30)",
        "import mmap\nm = mmap.mmap(-1, 10 * 2**30)",
        "x = []\nwhile True: x.append(bytearray(2**22))",
        "i = 0\nwhile True:\n    i += 1\n    open(f'f{i}', 'wb').write(bytes(2**23))",
        "f = open('f', 'wb')\nwhile True: f.write(bytes(2**20)); f.flush()",
    ],
)
def test_ten_gigabytes(box, program):
    assert box.run(program).how == "failed"


LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.mark.parametrize(
    "program",
    [
        """
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]
for _ in range(16):
    segment = libc.shmget(0, 64 << 20, 0o1600)
    assert segment >= 0
    place = libc.shmat(segment, None, 0)
    ctypes.memset(place, 1, 64 << 20)
    libc.shmdt(place)
""",
        "files = [os.memfd_create('x') for _ in range(40)]\nfor f in files: os.write(f, bytes(15 << 20))",
        """
assert libc.unshare(0x10020000) == 0  # of users and of mounts
open('/proc/self/uid_map', 'w').write('0 65534 1')
os.mkdir('/box/more')
assert libc.mount(b'tmpfs', b'/box/more', b'tmpfs', 0, None) == 0
""",
        "assert libc.syscall({'x86_64': 56}.get(os.uname().machine, 220), 0x10000011, 0, 0, 0, 0) == 0",
    ],
    ids=["System V", "memory files", "a mount of its own", "clone"],
)
def test_memory_that_limits_do_not_count(box, program):
    """Each would take the machine's memory within seconds, past the limits of process and folder."""
    found = box.run(LIBC + program)
    assert found.how == "failed" and ("not permitted" in found.detail or "AssertionError" in found.detail), found


def test_the_filter_lets_ordinary_programs_be(box):
    program = """
import subprocess, sys, threading
assert subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True).stdout == b"7\\n"
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
"""
    found = box.run(program)
    assert found.how == "passed", found


def test_an_unknown_processor_is_refused():
    assert len(seccomp_filter("x86_64")) % 8 == len(seccomp_filter("arm64")) % 8 == 0
    with pytest.raises(UserError, match="knows no riscv64"):
        seccomp_filter("riscv64")


def test_file_delete(box, tmp_path):
    mine = tmp_path / "precious"
    mine.write_text("here")
    tmp_path.chmod(0o777)
    mine.chmod(0o666)
    for program in (
        f"import os\nos.remove({str(mine)!r})",
        f"open({str(mine)!r}, 'w')",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        "import os\nos.remove('/usr/bin/env')",
        "open('/usr/new', 'w')",
        "open('/new', 'w')",
        "open('/dev/shm/new', 'w')",
        f"open({os.path.join(sys.base_prefix, 'new')!r}, 'w')",
        "import os\nos.mkdir('/proc/new')",
    ):
        assert box.run(program).how == "failed", program
    assert mine.read_text() == "here"
    assert box.run("open('own', 'w').write('1')\nassert open('own').read() == '1'").how == "passed"
    assert box.run("import os\nassert os.listdir() == []").how == "passed", (
        "files of the program before are still there"
    )


def test_network_call(box):
    reached = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)

    def listen():
        while not closing.is_set():
            try:
                reached.append(listener.accept())
            except TimeoutError:
                continue

    closing = threading.Event()
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        port = listener.getsockname()[1]
        for program in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=2)",
            "import socket\nassert [n for _, n in socket.if_nameindex() if n != 'lo']",
            "import os\nos.kill(-1, 9)\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) > 3",
        ):
            assert box.run(program).how == "failed", program
    finally:
        closing.set()
        thread.join()
        listener.close()
    assert not reached


def test_it_sees_nothing_of_its_starter(box, monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "hush")
    assert box.run("import os\nassert 'SECRET_OF_MINE' not in os.environ").how == "passed"
    assert box.run(f"import os\nassert not os.path.exists({str(Path(__file__).parent)!r})").how == "passed"
    assert box.run("import os\nassert os.getuid() != 0 or 'x' not in open('/proc/self/uid_map').read()").how == "passed"


def test_leaving_early_is_not_passing(box):
    for program in ("import os\nos._exit(0)", "import sys\nsys.exit(0)", "raise SystemExit", "quit()"):
        assert box.run(program).how == "failed", program


def test_without_a_box_nothing_runs(monkeypatch):
    monkeypatch.setattr(module, "_bwrap", lambda: None)
    with pytest.raises(UserError, match="bubblewrap"):
        find_sandbox(Limits(), is_unsafe=False)
    monkeypatch.setattr(module, "_bwrap", lambda: "/bin/false")
    with pytest.raises(UserError, match="does not hold"):
        find_sandbox(Limits(), is_unsafe=False)


def test_a_box_that_leaks_is_refused(monkeypatch):
    """A 'bubblewrap' that builds no box at all, but starts the program."""
    command = Sandbox._command
    monkeypatch.setattr(Sandbox, "_command", lambda self, calls: command(Sandbox(self.limits, None), calls))
    monkeypatch.setattr(module, "_bwrap", lambda: "/usr/bin/true")
    with pytest.raises(UserError, match=r"it (can|sees)"):
        find_sandbox(Limits(processes=10000), is_unsafe=False)


def test_limits_alone_say_so():
    found = find_sandbox(Limits(wall_s=3.0, cpu_s=2, processes=10000), is_unsafe=True)
    assert "files and network are open" in found.isolation
    assert found.run("pass").how == "passed" and found.run("assert False").how == "failed"
    assert found.run("x = bytearray(10 * 2**30)").how == "failed"
    assert found.run("import time\ntime.sleep(60)").how == "timeout"
