"""Make training data in processes that are killed, one after the other, until one of them comes to the end.

    python killed_generation.py FOLDER durable|random

Each process is forked from this one, which has imported everything and started no threads: FOLDER holds the target and
the prompts already. `durable`: the n-th process kills itself (SIGKILL) before or after its n-th step towards the disk
(fsync, rename). `random`: it is killed from outside at some moment soon after a file appeared. Prints how many were
killed.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ddtree.train.generate import generate_data
from train.pieces import small_request

LONGEST_DELAY_S = 0.1
MOST_KILLED = 8


def die_at(step: int, after: bool) -> None:
    """Have this process kill itself at its ``step``-th call that makes something durable."""
    left = [step]

    def deadly(call):
        def run(*arguments, **options):
            left[0] -= 1
            if left[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    os.fsync, os.replace, os.rename = map(deadly, (os.fsync, os.replace, os.rename))


def kill_at_a_change(child: int, folder: Path, dice: random.Random) -> int:
    """Kill a process soon after the files of a folder changed; returns the status that it left."""
    before = files_of(folder)
    while files_of(folder) == before:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    time.sleep(dice.uniform(0, LONGEST_DELAY_S))
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    request = small_request(folder)
    dice = random.Random(0)
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            if kind == "durable":
                die_at(killed // 2 + 1, after=killed % 2 == 1)
            generate_data(request, lambda stage, fraction: None)
            os._exit(0)
        if kind == "random" and killed < MOST_KILLED:
            status = kill_at_a_change(child, request.out, dice)
        else:
            status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        killed += 1
    print(killed)


main()
