"""Who has a place in the engine and who waits for one: slots, and pages of the cache."""

from collections import deque
from dataclasses import dataclass

from ddtree.engine.pages import PagePool
from ddtree.engine.prefix_cache import KeptPage, PrefixCache
from ddtree.engine.sequence import Sequence
from ddtree.engine.state import DeviceState
from ddtree.errors import UserError
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target


@dataclass(frozen=True)
class Occupancy:
    """How full an engine is.

    Attributes:
        running: sequences that have a slot.
        waiting: sequences that wait for one.
        cache_tokens_used: room of the cache that is promised to running sequences.
        cache_tokens: room of the cache.
        prefix_tokens: tokens whose keys and values later prompts can find, used or not.
    """

    running: int
    waiting: int
    cache_tokens_used: int
    cache_tokens: int
    prefix_tokens: int


class Seating:
    """Seats sequences on the slots of one `DeviceState`, in the order in which they came.

    A sequence is admitted when a slot and all the pages that it can ever need are free, so what runs is never evicted.
    What it finds of its prompt in the `PrefixCache` is not computed again.

    Args:
        pool: all pages.
        prefixes: gives and takes them.
        overlaps: a sequence may take part in one round after its last.

    Attributes:
        running: sequences that have a slot.
    """

    def __init__(
        self,
        state: DeviceState,
        pool: PagePool,
        prefixes: PrefixCache,
        target: Target,
        drafter: Drafter | None,
        *,
        overlaps: bool,
    ) -> None:
        self._state, self._pool, self._prefixes = state, pool, prefixes
        self._ropes = [model.rope for model in (target, drafter) if model is not None]
        self._block_size = drafter.config.block_size if drafter else 1
        self._overshoot = self._block_size if overlaps else 0
        self._waiting: deque[Sequence] = deque()
        self._free_slots = list(range(state.spare_slot))
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self.running

    @property
    def cache_tokens(self) -> int:
        """Room of the cache."""
        return (self._pool.n_pages - 1) * self._pool.page_tokens

    def occupancy(self) -> Occupancy:
        """How many sequences run and wait, and how much of the cache they hold."""
        return Occupancy(
            running=len(self.running),
            waiting=len(self._waiting),
            cache_tokens_used=self.cache_tokens - self._prefixes.free_pages * self._pool.page_tokens,
            cache_tokens=self.cache_tokens,
            prefix_tokens=self._prefixes.facts().tokens,
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            UserError: it could never be admitted.
        """
        if self._pages_of(sequence) > self._pool.n_pages - 1:
            raise UserError(
                f"the request needs a cache of {self._room_of(sequence)} tokens, the engine has {self.cache_tokens}",
                "lower max_new_tokens, or raise the memory fraction",
            )
        # The last token is computed in any case: what follows it is not kept.
        sequence.prefix_keys = self._prefixes.keys(sequence.prompt[:-1], self._kind_of(sequence))
        self._waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that nobody waits for any more."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self.running:
            self.release(sequence)

    def admit(self) -> None:
        """Seat those who wait, as far as there is room."""
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            found = self._prefixes.find(sequence.prefix_keys, drafts=sequence.shape.budget > 0)
            own_pages = self._pages_of(sequence) - len(found)
            if not self._prefixes.fits(found, own_pages):
                return
            self._waiting.popleft()
            self._seat(sequence, found, own_pages)

    def _seat(self, sequence: Sequence, found: list[KeptPage], own_pages: int) -> None:
        sequence.slot = self._free_slots.pop(0)
        sequence.pages = self._prefixes.take(found, own_pages)
        cached = len(found) * self._pool.page_tokens
        sequence.prefilled = sequence.committed = sequence.stats.cached_tokens = cached
        sequence.drafted = cached if sequence.shape.budget else 0
        self._prefixes.note_prompt(len(sequence.prompt), cached)
        self._state.seat(sequence.slot, sequence.prompt, sequence.pages, sequence.params, sequence.seed, cached)
        self.running.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free a running sequence's place; later ones can find its prompt and its answer."""
        self.running.remove(sequence)
        self.publish(sequence, [*sequence.prompt, *sequence.output][: sequence.committed])
        self._prefixes.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        self._free_slots.sort()

    def publish(self, sequence: Sequence, tokens: list[int]) -> None:
        """Let later sequences find the full pages of ``tokens``, which are a beginning of the sequence's own.

        The work that writes them must have been launched: work on the device runs in order.
        """
        if not sequence.is_sound:
            return
        keys = self._prefixes.keys(tokens, self._kind_of(sequence), sequence.prefix_keys)
        self._prefixes.publish(keys, sequence.pages, sequence.drafted // self._pool.page_tokens)

    def distrust(self) -> None:
        """After a fault, when nobody knows what was written: nothing of what is cached now will be found."""
        self._prefixes.clear()
        for sequence in self.running:
            sequence.is_sound = False

    def _pages_of(self, sequence: Sequence) -> int:
        return self._pool.pages_for(self._room_of(sequence))

    def _room_of(self, sequence: Sequence) -> int:
        """Tokens that the sequence's pages must hold: its own, a round's rows, and a round beyond its end."""
        return sequence.token_limit + self._overshoot + max(sequence.shape.rows, self._block_size)

    def _kind_of(self, sequence: Sequence) -> int:
        """What of a prompt's length its keys and values depend on."""
        return max(rope.length_kind(len(sequence.prompt)) for rope in self._ropes)
