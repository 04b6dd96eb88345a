"""Server-sent events out of a byte stream."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 2**20


class EventTooLong(Exception):
    """An event has no end within reason."""


class EventReader:
    """Feed it what the network gives; it returns the data of the events that are complete."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of each event that ``received`` completes; comments and other fields are passed over."""
        self._rest += received
        if b"\n" not in received and b"\r" not in received:
            self._check()
            return []
        lines = bytes(self._rest).replace(b"\r\n", b"\n").split(b"\n")
        self._rest = bytearray(lines.pop())
        self._check()
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events

    def _check(self) -> None:
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLong
