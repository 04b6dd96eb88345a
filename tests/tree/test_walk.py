"""Walking a tree by given choices."""

import numpy as np
import pytest

from ddtree.tree import DraftTree, build, walk


def small_tree():
    r"""Root with children 5 and 6; below 5 the tokens 7 and 8; below 8 a 9.

    root
    |- 5 (node 0)
    |  |- 7 (node 2)
    |  `- 8 (node 3)
    |     `- 9 (node 4)
    `- 6 (node 1)
    """
    return DraftTree(
        np.array([5, 6, 7, 8, 9]),
        np.array([-1, -1, 0, 0, 3]),
        np.array([1, 1, 2, 2, 3]),
        np.zeros(5, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("choices", "path", "bonus"),
    [
        ([5, 8, 0, 0, 9, 4], (0, 3, 4), 4),  # to the deepest node, whose choice is the bonus
        ([5, 7, 0, 3, 9, 4], (0, 2), 3),  # a leaf
        ([6, 8, 2, 0, 9, 4], (1,), 2),  # the other child; node 0's choice does not matter
        ([9, 8, 2, 0, 9, 4], (), 9),  # the token 9 is in the tree, but not below the root
        ([5, 6, 2, 0, 9, 4], (0,), 6),  # 6 is the root's child, not node 0's
    ],
)
def test_walk(choices, path, bonus):
    result = walk(small_tree(), choices)
    assert result.path == path
    assert result.bonus_token == bonus


def test_an_empty_tree_gives_the_roots_own_choice():
    tree = build(np.zeros((1, 1), dtype=np.float32), np.zeros((1, 1), dtype=np.int64), 0)
    assert walk(tree, [3]) == walk(tree, [3])
    assert walk(tree, [3]).bonus_token == 3


def test_wrong_number_of_choices():
    with pytest.raises(ValueError, match="5 choices for 6 rows"):
        walk(small_tree(), [0] * 5)


@pytest.mark.parametrize(
    ("tokens", "parents", "depths", "message"),
    [
        ([1, 2], [1, -1], [2, 1], "a parent must stand before"),
        ([1, 2], [-1, 0], [1, 1], "has depth 1, its parent asks for 2"),
        ([1, 1], [-1, -1], [1, 1], "siblings with one token 1"),
    ],
)
def test_impossible_trees_are_refused(tokens, parents, depths, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.zeros(2, dtype=np.float32))
