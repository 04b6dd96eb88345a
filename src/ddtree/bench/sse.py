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
        self._data_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """The data of each event that ``received`` completes; comments and other fields are passed over.

        Raises:
            EventTooLong: more than :data:`MAX_EVENT_BYTES` came without an event's end.
        """
        if b"\n" not in received:
            self._rest += received
            self._check()
            return []
        if self._rest:
            received = bytes(self._rest) + received
            self._rest.clear()
        if b"\r" in received:
            received = received.replace(b"\r\n", b"\n")
        *lines, rest = received.split(b"\n")
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data, self._data_bytes = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
        if rest or self._data:
            self._rest += rest
            self._check()
        return events

    def _check(self) -> None:
        if len(self._rest) + self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLong
