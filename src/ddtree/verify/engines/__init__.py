"""One adapter for each engine: how it is asked, and where it tells what really runs."""

from ddtree.verify.engines.adapter import Adapter, NotOffered
from ddtree.verify.engines.detect import ENGINES, detect

__all__ = ["ENGINES", "Adapter", "NotOffered", "detect"]
