"""What `serve` sets up in its process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, os, signal, sys, threading, time
from pathlib import Path
import httpx
from ddtree import Engine
from ddtree.server.run import serve
from ddtree.server.settings import ServerSettings

def load(tell):
    return Engine.load(Path(sys.argv[1]), device="cpu", dtype="float32", max_model_len=64, on_progress=tell)

def announce(line):
    if line.startswith("listening on "):
        threading.Thread(target=watch, args=(line.split()[-1],)).start()

def watch(url):
    stages = []
    while (told := httpx.get(f"{url}/ready")).status_code != 200:
        stages.append(told.json()["stage"])
        time.sleep(0.01)
    print(gc.get_freeze_count(), sys.getswitchinterval(), *stages, sep="; ", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

serve(ServerSettings(model_name="tiny", port=0), load, {}, announce)
"""


def test_nothing_of_the_loaded_engine_is_searched_for_garbage_and_threads_take_short_turns(tiny_folders):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tiny_folders[0]], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    frozen, switch_s, *stages = done.stdout.strip().split("; ")
    assert int(frozen) > 100_000 and float(switch_s) <= 1e-3
    assert stages and "ready" not in stages, "no stage is called ready before the server is"
