"""Draw one round's draft tree, the accepted path as its trunk.

A node's favourite child (the accepted one, else the likeliest) stands straight below it, its other children branch
off to the right. So a deep tree stays narrow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from ddtree.engine import TracedTree

ROOT = -1
_WIDEST_REMARK_COLUMN = 34


@dataclass(frozen=True)
class _Signs:
    root: str
    accepted: str
    rejected: str
    bonus: str
    branch: str
    trunk: str
    space: str
    newline: str


_UNICODE = _Signs("●", "✓", "·", "★", "├─", "│ ", "␣", "⏎")
_ASCII = _Signs("o", "v", ".", "*", "|-", "| ", "_", "\\n")


@dataclass(frozen=True)
class _Row:
    lead: str
    token: str
    remark: str
    style: str


def draw_tree(traced: TracedTree, token_text: Callable[[int], str], console: Console, most_nodes: int = 24) -> None:
    """Print the tree of a round: every accepted node, and the likeliest others up to ``most_nodes`` in all."""
    signs = _UNICODE if console.encoding.lower().startswith("utf") else _ASCII

    def show(token_id: int) -> str:
        return readable(token_text(token_id), signs.space, signs.newline)

    shown = nodes_to_show(traced, most_nodes)
    rows = [
        _Row(f"{signs.root} ", show(traced.root_token), "root, committed before", "bold"),
        *_rows(traced, shown, show, signs),
        _Row(f"{signs.bonus} ", show(traced.bonus_token), "bonus, the target's own", "bold yellow"),
    ]
    remark_column = min(max(cell_len(row.lead + row.token) for row in rows) + 2, _WIDEST_REMARK_COLUMN)
    for row in rows:
        gap = " " * max(2, remark_column - cell_len(row.lead + row.token))
        line = Text.assemble(row.lead, (row.token, row.style), gap, (row.remark, "dim"))
        line.truncate(console.width, overflow="ellipsis")
        console.print(line, no_wrap=True)
    if hidden := len(traced.tree) - len(shown):
        console.print(f"({hidden} less likely nodes are not drawn)", style="dim")


def nodes_to_show(traced: TracedTree, most_nodes: int) -> set[int]:
    """The accepted path, then the best other nodes; a node never without its parent."""
    shown = set(traced.path)
    for node in range(len(traced.tree)):  # best first, so parents come before children
        if len(shown) >= most_nodes:
            break
        if (parent := int(traced.tree.parents[node])) == ROOT or parent in shown:
            shown.add(node)
    return shown


def readable(text: str, space: str = "␣", newline: str = "⏎") -> str:
    """Token text with its blanks made visible and nothing that could upset a terminal."""
    text = text.replace(" ", space).replace("\n", newline)
    return "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in text) or "''"


def _rows(traced: TracedTree, shown: set[int], show: Callable[[int], str], signs: _Signs) -> Iterator[_Row]:
    """The shown nodes from top to bottom."""
    tree, accepted = traced.tree, set(traced.path)
    last_accepted = traced.path[-1] if traced.path else ROOT
    children: dict[int, list[int]] = defaultdict(list)
    for node in sorted(shown):  # likeliest first
        children[int(tree.parents[node])].append(node)

    def row(node: int, lead: str) -> _Row:
        parent = int(tree.parents[node])
        log_probability = float(tree.log_scores[node]) - (0.0 if parent == ROOT else float(tree.log_scores[parent]))
        sign, style = (signs.accepted, "bold green") if node in accepted else (signs.rejected, "dim")
        remark = f"{100 * math.exp(log_probability):5.1f} %"
        return _Row(f"{lead}{sign} ", show(int(tree.token_ids[node])), remark, style)

    def below(node: int, lead: str) -> Iterator[_Row]:
        while family := children.get(node):
            straight = next((child for child in family if child in accepted), family[0])
            trunk_ends = node == last_accepted  # what the target did not choose branches off; the bonus goes on
            for child in family:
                if trunk_ends or child != straight:
                    yield row(child, f"{lead}{signs.branch} ")
                    yield from below(child, f"{lead}{signs.trunk} ")
            if trunk_ends:
                return
            yield row(straight, lead)
            node = straight

    return below(ROOT, "")
