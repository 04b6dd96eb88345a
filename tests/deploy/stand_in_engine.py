#!/usr/bin/env python3
"""An engine that starts at once and can be told to misbehave: what deploys it is what is tested.

It takes the native engine's flags. What it shall do comes from the environment. FAULT: die, hang, refuse, slow, babble,
mute (no token), second (another process takes the port), orphan (a helper outlives it), impostor (it bears another
invocation), escapes (it dies, and writes to the terminal of whoever reads its log).
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

fault = os.environ.get("FAULT", "")
flags = dict(zip(sys.argv[2::1], sys.argv[3::1], strict=False))
port = int(flags["--port"])
key = Path(flags["--api-key-file"]).read_text().strip() if "--api-key-file" in flags else None
asked = 0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        """Keep the log short."""

    def _answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        global asked
        asked += 1
        if self.path == "/server_info":
            name = "another" if fault == "impostor" else os.environ["INVOCATION_ID"]
            self._answer(200, {"process": {"invocation": name}})
            return
        ready = fault != "slow" and asked > 1
        self._answer(200 if ready else 503, {"stage": "reading weights", "progress": 0.5})

    def do_POST(self):
        if fault == "hang":
            time.sleep(60)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._answer(401, {"error": {"message": "no such key"}})
        elif body["model"] != flags["--served-model-name"]:
            self._answer(404, {"error": {"message": "no such model"}})
        elif fault == "refuse":
            self._answer(400, {"error": {"message": "I do not\nfeel like it"}})
        elif fault == "babble":
            self._answer(200, {"hello": "world"})
        else:
            choice = {"text": " Paris", "index": 0, "finish_reason": "length"}
            self._answer(200, {"choices": [choice], "usage": {"completion_tokens": int(fault != "mute")}})


print("engine starts with budget", flags.get("--budget"), "home", os.environ.get("HOME"), flush=True)
if fault == "die":
    print("out of memory, of all things", flush=True)
    sys.exit(3)
if fault == "escapes":
    print("\x1b]0;owned\x07\x1b[2Jred \x1b[31m\x9b31m and \u202e turned", flush=True)
    sys.exit(3)
if fault == "second":
    serve = f"import http.server as h; h.HTTPServer(('127.0.0.1', {port}), h.SimpleHTTPRequestHandler).serve_forever()"
    other = subprocess.Popen([sys.executable, "-c", serve], start_new_session=True)
    print("the other one is", other.pid, flush=True)
    time.sleep(60)
if fault == "orphan":
    helper = subprocess.Popen(["sleep", "600"])
    print("helper", helper.pid, flush=True)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
