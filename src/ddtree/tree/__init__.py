"""The DDTree algorithm alone, in NumPy: the oracle that every faster version is tested against.

Source: "DDTree: Diffusion Draft Tree", arXiv 2604.12989. Nothing here knows a model, a kernel or a device.
"""

from ddtree.tree.build import build, order_key
from ddtree.tree.draft_tree import ROOT, DraftTree
from ddtree.tree.walk import Walk, walk

__all__ = ["ROOT", "DraftTree", "Walk", "build", "order_key", "walk"]
