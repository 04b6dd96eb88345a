"""Verdicts as Prometheus gauges: for a scrape of `ddtree verify --watch`, or a text file for node_exporter."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, start_http_server, write_to_textfile

from ddtree.errors import UserError
from ddtree.verify.finding import EXIT_CODES, Status, Verdict

_NUMBERS = {
    "tau": "Committed tokens per round in the speculation probe.",
    "decode_tok_s": "Decode speed of one request, tokens a second.",
    "near_ties": "Tokens that are not the target's first choice, within the near-tie bound.",
}


class Gauges:
    """The last verdict; one registry of its own, so that nothing of this process mixes in."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._verdict = self._gauge("verdict", "Exit code of the last verdict: 0 proven, 1 violated, 3 not checked.")
        self._claims = self._gauge("claims", "Claims of the last verdict by what is known.", "probe", "status")
        self._seconds = self._gauge("duration_seconds", "Time that the last verification took.")
        self._when = self._gauge("last_run_timestamp_seconds", "When the last verification ended.")
        self._proven = self._gauge("last_proven_timestamp_seconds", "When the verdict was proven last; 0: never.")
        self._numbers = {name: self._gauge(name, words) for name, words in _NUMBERS.items()}

    def set(self, verdict: Verdict) -> None:
        """Replace the last verdict; a number that was not measured this time is not a number."""
        now = time.time()
        self._verdict.labels(verdict.target).set(EXIT_CODES[verdict.status])
        self._claims.clear()
        for finding in verdict.findings:
            for status in Status:  # zeroes too, so that a rate and an alert see every series
                child = self._claims.labels(verdict.target, finding.probe, status.value)
                child.inc(finding.status is status)
        self._seconds.labels(verdict.target).set(verdict.seconds)
        self._when.labels(verdict.target).set(now)
        if verdict.status is Status.proven:
            self._proven.labels(verdict.target).set(now)
        else:
            self._proven.labels(verdict.target).inc(0)
        for name, gauge in self._numbers.items():
            gauge.labels(verdict.target).set(verdict.measured.get(name, float("nan")))

    def serve(self, address: str, port: int) -> int:
        """Answer scrapes in a thread of its own; returns the port.

        Raises:
            UserError: the port cannot be had.
        """
        try:
            server, _ = start_http_server(port, address, self.registry)
        except OSError as error:
            raise UserError(
                f"cannot listen on {address} port {port} ({error.strerror})", "choose another --metrics-port"
            ) from None
        return int(server.server_address[1])

    def write(self, file: Path) -> None:
        """For node_exporter's textfile collector; replaced as a whole.

        Raises:
            UserError: it cannot be written.
        """
        try:
            write_to_textfile(os.fspath(file), self.registry)
        except OSError as error:
            raise UserError(f"cannot write {file} ({error.strerror})", "give --textfile a folder of yours") from None

    def _gauge(self, name: str, words: str, *labels: str) -> Gauge:
        return Gauge(f"ddtree_verify_{name}", words, ["target", *labels], registry=self.registry)
