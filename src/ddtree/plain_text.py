"""Text from elsewhere, made harmless for a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "\n\t") -> str:
    """``text`` with control characters, terminal escapes among them, written out: ``\\x1b`` for the escape character.

    Args:
        keep: characters that stay as they are.
    """
    return "".join(one if one.isprintable() or one in keep else _written_out(one) for one in text)


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode() if ord(character) > 31 else f"\\x{ord(character):02x}"
