"""Who owns which page of the cache."""

import heapq

from ddtree.kernels.paged import TRASH_PAGE


class PagePool:
    """Pages of the cache, handed out lowest number first, so that one sequence's pages tend to be neighbours.

    Args:
        n_pages: pages of the cache, the trash page included.
        page_tokens: tokens a page holds.
    """

    def __init__(self, n_pages: int, page_tokens: int) -> None:
        self.n_pages, self.page_tokens = n_pages, page_tokens
        self._free = [page for page in range(n_pages) if page != TRASH_PAGE]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_tokens)

    def take(self, count: int) -> list[int]:
        """``count`` pages, in ascending order; the caller checks `free_pages` first."""
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)
