"""The one error that is the user's to solve: bad input, or an environment that lacks something."""

from __future__ import annotations

from ddtree.plain_text import printable


class UserError(Exception):
    """Bad input or environment, told in one line: what is wrong, and what to do about it.

    Raise it wherever a person can remedy the fault. The ``ddtree`` command prints it on stderr and exits 2,
    without a traceback. Faults of ddtree itself are ordinary exceptions and keep their traceback.
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = _one_line(cause)
        self.remedy = _one_line(remedy)
        super().__init__(self.cause, self.remedy)

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}" if self.remedy else self.cause


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
