"""Pages of the cache that later sequences with the same beginning read instead of computing them again.

A page is known by all tokens up to its end, hashed page after page, so that equal keys mean equal keys and values. Only
pages that are full of a sequence's own tokens are kept: what a round wrote beyond a stop is never part of a key. With a
page goes whether the drafter's context of it is there too; sequences that draft take no other, so that what they accept
is the same as without the cache. Pages that nobody reads are given up when others need them, the least recently used
first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ddtree.engine.pages import PagePool


@dataclass(eq=False)
class KeptPage:
    """A page that several sequences may read.

    Attributes:
        key: of all tokens up to its end.
        page: its number.
        is_drafted: it holds the drafter's context too.
        users: sequences that read it now.
        is_listed: later sequences can find it.
    """

    key: bytes
    page: int
    is_drafted: bool
    users: int
    is_listed: bool = True


@dataclass(frozen=True)
class PrefixFacts:
    """What the cache did so far.

    Attributes:
        tokens: tokens that the next sequence could find.
        prompt_tokens: tokens of all prompts that were admitted.
        hit_tokens: those of them that were found.
        evicted_tokens: tokens given up for other sequences.
    """

    tokens: int
    prompt_tokens: int
    hit_tokens: int
    evicted_tokens: int


class PrefixCache:
    """Hands out the pages of a pool, and takes them back in a way that keeps what they hold as long as possible.

    Args:
        pool: every page that is not kept here.
        is_on: whether anything is kept at all.
    """

    def __init__(self, pool: PagePool, *, is_on: bool) -> None:
        self._pool, self._is_on = pool, is_on
        self._by_key: dict[bytes, KeptPage] = {}
        self._by_page: dict[int, KeptPage] = {}
        self._unread: OrderedDict[bytes, KeptPage] = OrderedDict()  # the least recently used first
        self._prompt_tokens = self._hit_tokens = self._evicted = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be had, those included that would have to be given up."""
        return self._pool.free_pages + len(self._unread)

    def facts(self) -> PrefixFacts:
        """May be called from another thread."""
        size = self._pool.page_tokens
        return PrefixFacts(len(self._by_key) * size, self._prompt_tokens, self._hit_tokens, self._evicted * size)

    def keys(self, tokens: Seq[int], kind: int = 0, known: Seq[bytes] = ()) -> list[bytes]:
        """Keys of the full pages of ``tokens``; none where nothing is kept.

        Args:
            kind: sequences of different kinds have different keys and values for the same tokens.
            known: keys of the first pages, where they were asked for before.
        """
        if not self._is_on:
            return []
        size = self._pool.page_tokens
        keys = list(known[: len(tokens) // size])
        for end in range(size * (len(keys) + 1), len(tokens) + 1, size):
            before = keys[-1] if keys else kind.to_bytes(8, "little")
            keys.append(hashlib.sha256(before + array("q", tokens[end - size : end]).tobytes()).digest())
        return keys

    def find(self, keys: Seq[bytes], drafts: bool) -> list[KeptPage]:
        """The longest beginning that is kept.

        Args:
            drafts: the drafter's context must be there too.
        """
        found = []
        for key in keys:
            kept = self._by_key.get(key)
            if kept is None or (drafts and not kept.is_drafted):
                break
            found.append(kept)
        return found

    def fits(self, found: Seq[KeptPage], count: int) -> bool:
        """Whether ``found`` and ``count`` more pages can be had at once."""
        return self.free_pages - sum(not kept.users for kept in found) >= count

    def take(self, found: Seq[KeptPage], count: int) -> list[int]:
        """Pages for a sequence: ``found``, which it may only read, and ``count`` of its own; see `fits`."""
        for kept in found:
            if not kept.users:
                del self._unread[kept.key]
            kept.users += 1
        for _ in range(count - self._pool.free_pages):
            _, evicted = self._unread.popitem(last=False)
            self._forget(evicted)
            self._evicted += 1
        return [kept.page for kept in found] + self._pool.take(count)

    def note_prompt(self, tokens: int, hit_tokens: int) -> None:
        """Count an admitted prompt."""
        self._prompt_tokens += tokens
        self._hit_tokens += hit_tokens

    def publish(self, keys: Seq[bytes], pages: Seq[int], drafted_pages: int) -> None:
        """Let others find the first pages of a sequence that still holds all of them.

        Args:
            keys: of the pages that are full and written.
            pages: of the sequence, at least as many.
            drafted_pages: so many of them, from the first on, hold the drafter's context.
        """
        for place, (key, page) in enumerate(zip(keys, pages, strict=False)):
            known, is_drafted = self._by_key.get(key), place < drafted_pages
            if page in self._by_page or (known is not None and (known.is_drafted or not is_drafted)):
                continue  # shared already, or no better than what is there
            if known is not None:
                self._unlist(known)
            self._by_key[key] = self._by_page[page] = KeptPage(key, page, is_drafted, users=1)

    def release(self, pages: Seq[int]) -> None:
        """A sequence ends; what others can find stays, the end of the text to be given up before its beginning."""
        for page in reversed(pages):
            kept = self._by_page.get(page)
            if kept is None:
                self._pool.give_back([page])
                continue
            kept.users -= 1
            if not kept.users:
                if kept.is_listed:
                    self._unread[kept.key] = kept
                else:
                    self._forget(kept)

    def clear(self) -> None:
        """Let nobody find anything any more; sequences that run keep what they read."""
        for kept in list(self._by_key.values()):
            self._unlist(kept)

    def _unlist(self, kept: KeptPage) -> None:
        kept.is_listed = False
        del self._by_key[kept.key]
        if not kept.users:
            del self._unread[kept.key]
            self._forget(kept)

    def _forget(self, kept: KeptPage) -> None:
        """Give a page back that nobody reads."""
        if kept.is_listed:
            del self._by_key[kept.key]
        del self._by_page[kept.page]
        self._pool.give_back([kept.page])
