"""The drawing of a tree, line by line."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ddtree.cli.draw_tree import draw_tree, nodes_to_show, readable
from ddtree.tree import DraftTree

WORDS = [" The", " sky", " sea", " is", " was", " blue", "\n", " so", " very", " deep"]


def tree(*nodes: tuple[int, int, float]) -> DraftTree:
    """From (token, parent, probability given its parent), best first."""
    depths: list[int] = []
    scores: list[float] = []
    for _, parent, probability in nodes:
        depths.append(1 if parent < 0 else depths[parent] + 1)
        scores.append(float(np.log(probability)) + (0.0 if parent < 0 else scores[parent]))
    return DraftTree(
        np.array([node[0] for node in nodes], np.int64),
        np.array([node[1] for node in nodes], np.int64),
        np.array(depths, np.int64),
        np.array(scores, np.float32),
    )


def traced(path: tuple[int, ...]) -> Any:
    #                  0: sky        1: is          2: sea         3: was         4: blue        5: is (sea)
    nodes = tree((1, -1, 0.6), (3, 0, 0.7), (2, -1, 0.3), (4, 0, 0.2), (5, 1, 0.5), (3, 2, 0.4), (6, 4, 0.25))
    return SimpleNamespace(tree=nodes, root_token=0, path=path, bonus_token=7)


def drawn(path: tuple[int, ...], most_nodes: int = 24, width: int = 60, encoding: str = "utf-8") -> list[str]:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    draw_tree(traced(path), lambda token: WORDS[token], Console(file=buffer, width=width), most_nodes)
    buffer.seek(0)
    return [line.rstrip() for line in buffer.read().splitlines()]


def test_the_accepted_path_is_the_trunk() -> None:
    assert drawn((0, 3)) == [
        "● ␣The      root, committed before",
        "├─ · ␣sea    30.0 %",
        "│  · ␣is     40.0 %",
        "✓ ␣sky       60.0 %",
        "├─ · ␣is     70.0 %",
        "│  · ␣blue   50.0 %",
        "│  · ⏎       25.0 %",
        "✓ ␣was       20.0 %",
        "★ ␣so       bonus, the target's own",
    ]


def test_nothing_accepted() -> None:
    lines = drawn(())
    assert not any("✓" in line for line in lines)
    assert sum(line.startswith("├─") for line in lines) == 2  # both children of the root branch off
    assert lines[-1].startswith("★ ␣so")


def test_what_follows_the_last_accepted_node_branches_off() -> None:
    lines = drawn((0, 1))
    assert lines[lines.index("✓ ␣is        70.0 %") + 1].startswith("├─ · ␣blue")


def test_a_small_drawing_keeps_the_path_and_parents_and_says_what_is_missing() -> None:
    lines = drawn((0, 1, 4, 6), most_nodes=5)
    assert sum("✓" in line for line in lines) == 4
    assert lines[-1] == "(2 less likely nodes are not drawn)"
    for most in range(8):
        shown = nodes_to_show(traced((0, 3)), most)
        assert {0, 3} <= shown and len(shown) == max(2, min(most, 7))
        assert all(traced(()).tree.parents[node] in {-1, *shown} for node in shown)


def test_every_node_is_drawn_once() -> None:
    for path in [(), (0,), (2, 5), (0, 1, 4, 6)]:
        assert sum("%" in line for line in drawn(path)) == 7


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    text = "\n".join(drawn((0, 3), encoding="ascii"))
    assert text.isascii() and "v _sky" in text and "|- . _sea" in text


def test_narrow_terminals_cut_lines_instead_of_wrapping() -> None:
    assert all(len(line) <= 20 for line in drawn((0, 3), width=20))


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a b", "␣a␣b"), ("\n\n", "⏎⏎"), ("\x1b[31m", "\\x1b[31m"), ("", "''"), ("\t", "\\x09"), ("é", "é")],
)
def test_tokens_are_readable_and_harmless(text: str, shown: str) -> None:
    assert readable(text) == shown
