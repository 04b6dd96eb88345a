"""Budget ``auto``: its table filled from servers that run already, then a server that reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ways import Way, tree

NAME = "auto"
ONLY_THE_TABLE = {"DDTREE_SGLANG_CHILD": "1"}  # starts no child servers: what the table lacks is an error
FILL = """
import json, sys
import torch
from ddtree.sglang.budget_choice import _version
from ddtree.sglang.width_measure import measure_server
from ddtree.sglang.width_table import CONCURRENCIES, WidthRow, WidthTable, width_key
versions = {"torch": torch.__version__} | {name: _version(name) for name in ("sglang", "ddtree")}
servers = json.load(sys.stdin)
table = None
for budget, (url, fields) in servers.items():
    table = table or WidthTable.load(width_key(fields, torch.cuda.get_device_name(), versions))
    table.rows[int(budget)] = WidthRow(True, measure_server(url, CONCURRENCIES))
table.rows.setdefault(8, WidthRow(False))  # not among the servers
table.save()
print(json.dumps({b: row.tok_s for b, row in table.rows.items()}))
"""


def start_auto(run: Any, timed: list[str]) -> None:
    """Measure the trees that run, start a server with ``auto`` and see which of them it takes."""
    running = {name[4:]: run.servers[name] for name in timed if name.startswith("tree")}
    given = {b: (f"http://127.0.0.1:{s.port}", json.loads(s.get("/server_info"))) for b, s in running.items()}
    done = subprocess.run(
        [sys.executable, "-c", FILL], input=json.dumps(given), env=run.env, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    run.results["budgets"]["measured"] = json.loads(done.stdout.splitlines()[-1])
    run.say(f"measured for auto: {done.stdout.splitlines()[-1]}")
    server = run.start_one(NAME, Way(tree("auto"), environment=ONLY_THE_TABLE, timed=True), 30000 + 200 * 30)
    if not run.wait(server):
        return
    server.answer_all(run.prompts, 4)
    lines = (server.log.read_text(errors="replace") if server.log else "").splitlines()
    run.results["budgets"] |= {"auto_ready": True, "auto_says": [line for line in lines if "budget auto is" in line]}
    run.say(run.results["budgets"]["auto_says"])
