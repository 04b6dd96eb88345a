"""Where a scheduler's thread spends its time: installed as ``sitecustomize``; ``STACK_SAMPLES`` names its file."""

import collections
import os
import sys
import threading
import time

_target = os.environ.get("STACK_SAMPLES")


def _watch(path: str) -> None:
    main = threading.main_thread().ident
    leaves: collections.Counter[str] = collections.Counter()
    whole: collections.Counter[str] = collections.Counter()
    total, written = 0, time.time()
    while True:
        time.sleep(0.002)
        frame, seen, first = sys._current_frames().get(main), set(), True
        stack = []
        while frame is not None:
            code = frame.f_code
            place = "/".join(code.co_filename.split("/")[-2:])
            stack.append(f"{place}:{code.co_name}")
            if first:
                leaves[f"{place}:{frame.f_lineno}:{code.co_name}"] += 1
                first = False
            frame = frame.f_back
        if not any("run_batch" in name or "process_batch_result" in name for name in stack):
            continue  # idle
        total += 1
        for name in stack:
            if name not in seen:
                seen.add(name)
                whole[name] += 1
        if time.time() - written > 3:
            written = time.time()
            with open(f"{path}.{os.getpid()}", "w") as out:
                out.write(f"{total} busy samples\n")
                for counter, title in ((whole, "inclusive"), (leaves, "leaf lines")):
                    out.write(f"-- {title}\n")
                    for name, count in counter.most_common(90):
                        out.write(f"{100 * count / total:6.1f} {name}\n")


if _target and "spawn_main" in " ".join(sys.orig_argv):
    threading.Thread(target=_watch, args=(_target,), daemon=True).start()
