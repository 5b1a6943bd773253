"""Who owns which KV block: reference counts, the prefix cache, the host pool and the fences between them."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from engine.free_list import FreeList
from engine.prefix import HashFunction, PrefixHasher, xxh3_128
from engine.request import BlockCopy, Sequence, Status

# free blocks that a new table leaves behind itself to grow into, if it may grow so far
MAX_ROOM = 8


class BlockManager:
    """
    Gives KV blocks to sequences and takes them back; copies nothing itself.

    A block is referenced (by sequences, and by a fence after they let it go) or it is on
    the free list. A free block may still hold a cached prefix: it is found by its hash and
    taken off the list, or it is overwritten when its turn comes, least recently used first.

    Blocks that a sequence lets go may still be read and written by steps in flight, so
    they come back when the newest step launched until then has completed (the fence).

    Args:
        num_blocks: Device blocks, with block 0, the null block, that nobody gets.
        block_size: Tokens of a block.
        num_host_blocks: Blocks in host memory for swapped sequences.
        prefix_caching: Share full blocks of equal prefixes.
        hash_function: Names blocks; see `engine.prefix`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        hash_function: HashFunction = xxh3_128,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.prefix_caching = prefix_caching
        self.query_tokens = 0
        self.hit_tokens = 0

        self._hasher = PrefixHasher(block_size=block_size, hash_function=hash_function)
        self._references = np.zeros(num_blocks, dtype=np.int32)
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # blocks that a second sequence has found in the cache: others are likely to
        self._popular = np.zeros(num_blocks, dtype=np.bool_)
        # prompt blocks that a running sequence is about to fill, by hash
        self._computing: dict[bytes, Sequence] = {}
        self._free = FreeList(num_blocks)
        self._free.push_first(range(num_blocks - 1, 0, -1))
        self._free_host = list(range(num_host_blocks - 1, -1, -1))

        self._launched = 0
        self._completed = 0
        # (step, device blocks, host blocks) that come back when the step has completed, steps ascending
        self._fences: deque[tuple[int, list[int], list[int]]] = deque()
        self.num_fenced_blocks = 0

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had now: never used, or cached and not referenced."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks in the tables of sequences, each counted once; fewer while shared ones are fenced."""
        return max(0, self.num_usable_blocks - len(self._free) - self.num_fenced_blocks)

    @property
    def fenced_tables(self) -> Iterator[list[int]]:
        """What sequences have let go that is not back yet, one by one."""
        return (device_blocks for _, device_blocks, _ in self._fences)

    @property
    def num_free_host_blocks(self) -> int:
        return len(self._free_host)

    @property
    def usage(self) -> float:
        """The fraction of usable blocks that are referenced."""
        return 1 - len(self._free) / self.num_usable_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """
        Find the blocks of leading tokens that are cached and could be reused now: what is `matched` elsewhere.

        They can be until somebody is given blocks. The last known token is always left to be
        computed: its logits are wanted. A swapped sequence reuses no more than it had computed.
        Changes nothing but `block_hashes`.
        """
        if not self._reads_cache(sequence):
            return []
        count = self._num_shareable(sequence)
        matched: list[int] = []
        for block in map(self._cached.get, self._hasher.extend(sequence, count)[:count]):
            if block is None:
                break
            matched.append(block)
        return matched

    def is_being_computed(self, sequence: Sequence, matched: list[int]) -> bool:
        """
        Whether the first full prompt block that the cache lacks is being filled by a running sequence.

        A less urgent one is not waited for: its turn may be long in coming.
        """
        if not self._computing or not self._reads_cache(sequence) or len(matched) >= self._num_shareable(sequence):
            return False
        other = self._computing.get(sequence.block_hashes[len(matched)])
        return other is not None and other.request.priority <= sequence.request.priority

    def num_blocks_to_start(self, sequence: Sequence, matched: list[int]) -> int:
        """Count what `allocate` or `swap_in` would take from the free blocks."""
        return self.num_blocks_for(sequence.num_tokens) - int(np.count_nonzero(self._references[matched]))

    def num_to_free(self, tables: Iterable[list[int]], wanted: int, *, kept: list[int]) -> int | None:
        """
        Count how many of these tables must be let go, from the first on, for so many blocks to have no owner.

        None where all of them are not enough. Changes nothing.

        Args:
            kept: Blocks that are no gain, as they will have another owner then.
        """
        references = self._references.copy()
        references[np.array(kept, dtype=np.int64)] += 1
        for count, table in enumerate(tables, 1):
            references[table] -= 1
            # those that others have too come with the last of them
            wanted -= len(table) - int(np.count_nonzero(references[table]))
            if wanted <= 0:
                return count
        return None

    def allocate(self, sequence: Sequence, matched: list[int]) -> int:
        """
        Give a waiting sequence blocks for all its tokens and return how many tokens are cached already.

        Needs `num_blocks_to_start` free blocks. Sets num_computed to the cached tokens.
        """
        self._start(sequence, matched)
        num_cached = len(matched) * self.block_size
        sequence.num_computed = num_cached
        self.query_tokens += sequence.num_tokens
        self.hit_tokens += num_cached
        return num_cached

    def grow(self, tables: list[list[int]], newest: NDArray[np.int32]) -> NDArray[np.int64]:
        """
        Give one more block to each of these tables of running sequences; needs as many free ones.

        Args:
            newest: [len(tables)], the last of each, which the caller has at hand.

        Returns:
            The blocks.
        """
        taken, cached = self._free.pop_behind(newest, room=MAX_ROOM)
        self._references[taken] = 1
        self._forget(cached)
        for table, block in zip(tables, taken.tolist(), strict=True):
            table.append(block)
        return taken

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Put the full blocks of the first `num_tokens` tokens, all known and computed, in the prefix cache."""
        first, stop = sequence.num_committed, num_tokens // self.block_size
        if not self.prefix_caching or stop <= first:
            return
        cached, computing, hashes = self._cached, self._computing, self._hashes
        names = self._hasher.extend(sequence, stop)[first:stop]
        for name, block in zip(names, sequence.block_table[first:stop], strict=True):
            if computing and computing.get(name) is sequence:
                del computing[name]
            # computed twice: the first copy stays the cached one, this one ends with its sequence
            if name not in cached:
                cached[name] = block
                hashes[block] = name
        sequence.num_committed = stop

    def reset_cache(self) -> None:
        """Forget all cached content; blocks in use stay in use, and those that answers filled are shared later."""
        self._cached.clear()
        self._hashes = [None] * self.num_blocks

    def discard(self, sequence: Sequence) -> None:
        """Forget the cached content of a sequence's blocks, and share no more of it: it is not to be trusted."""
        self._forget(sequence.block_table)
        sequence.num_known_at_start = sequence.num_tokens

    def free(self, sequence: Sequence) -> None:
        """
        Take back all device and host blocks of a sequence, behind the newest launched step.

        Blocks that its answer has filled are shared from now on. Before, nobody could ask for them: a
        prompt that contains an answer comes after it.
        """
        if sequence.block_table and sequence.num_known > sequence.num_known_at_start:
            # the last known token is computed by the step in flight, if at all
            self.commit(sequence, sequence.num_known - 1)
        self._stop_computing(sequence)
        # tail first: the end of a prefix is worth less than its beginning
        self._fence(self._launched, sequence.block_table[::-1], sequence.host_blocks)
        sequence.block_table = []
        sequence.host_blocks = []
        sequence.num_committed = 0

    def swap_out(self, sequence: Sequence) -> list[BlockCopy]:
        """
        Move a running sequence to host blocks and return the copies that the next step must do first.

        Needs as many free host blocks as hold its computed tokens.
        """
        count = self.num_blocks_for(sequence.num_computed)
        host_blocks = [self._free_host.pop() for _ in range(count)]
        copies = [
            BlockCopy(device_block=device, host_block=host)
            for device, host in zip(sequence.block_table, host_blocks, strict=False)
        ]
        self.free(sequence)
        sequence.host_blocks = host_blocks
        return copies

    def swap_in(self, sequence: Sequence, matched: list[int]) -> list[BlockCopy]:
        """
        Give a swapped sequence device blocks for all its tokens and return the copies that fill them.

        Needs `num_blocks_to_start` free blocks. Blocks that are still cached are not copied. The
        host blocks come back when the next step has completed.
        """
        self._start(sequence, matched)
        host_blocks = sequence.host_blocks
        copies = [
            BlockCopy(device_block=sequence.block_table[index], host_block=host_blocks[index])
            for index in range(len(matched), len(host_blocks))
        ]
        self._fence(self._launched + 1, [], host_blocks)
        sequence.host_blocks = []
        return copies

    def launched(self, step_id: int) -> None:
        """Note a step that reads and writes blocks from now on."""
        self._launched = step_id

    def completed(self, step_id: int) -> None:
        """Note that a step, and all before it, touch no block any more: blocks fenced by them come back."""
        self._completed = step_id
        tables: list[list[int]] = []
        while self._fences and self._fences[0][0] <= step_id:
            _, device_blocks, host_blocks = self._fences.popleft()
            self.num_fenced_blocks -= len(device_blocks)
            tables.append(device_blocks)
            self._free_host += host_blocks
        if tables:
            self._release(tables)

    def check(self, owners: Iterable[Sequence]) -> None:
        """
        Compare the books with the tables of all sequences that own blocks.

        Raises:
            AssertionError: when an invariant is broken; says both sides in numbers.
        """
        expected = [0] * self.num_blocks
        host = list(self._free_host)
        fenced = [block for _, blocks, _ in self._fences for block in blocks]
        host += [block for _, _, blocks in self._fences for block in blocks]
        for sequence in owners:
            fenced += sequence.block_table
            host += sequence.host_blocks
        for block in fenced:
            expected[block] += 1
        for block, (want, have) in enumerate(zip(expected, self._references.tolist(), strict=True)):
            assert want == have, f"block {block} has {want} owners and {have} references"
        for block in range(1, self.num_blocks):
            free = block in self._free
            assert free == (not self._references[block]), f"block {block}: {self._references[block]} refs, free {free}"
        assert not self._references[0], f"the null block has {self._references[0]} references"
        self._free.check()
        assert sorted(host) == list(range(self.num_host_blocks)), f"{len(host)} of {self.num_host_blocks} host blocks"
        for name, block in self._cached.items():
            assert self._hashes[block] == name, f"block {block} is cached under another name"
        hashed = sum(1 for name in self._hashes if name is not None)
        assert hashed == len(self._cached), f"{hashed} blocks have a name and {len(self._cached)} are cached"

    def _reads_cache(self, sequence: Sequence) -> bool:
        if not self.prefix_caching:
            return False
        # the logits of cached tokens are not computed, and prompt logprobs need them
        return sequence.status is Status.SWAPPED or sequence.params.prompt_logprobs is None

    def _num_shareable(self, sequence: Sequence) -> int:
        if sequence.status is Status.SWAPPED:
            return sequence.num_computed // self.block_size
        return (sequence.num_known - 1) // self.block_size

    def _start(self, sequence: Sequence, matched: list[int]) -> None:
        if matched:
            self._share(np.array(matched, dtype=np.int64))
        count = self.num_blocks_for(sequence.num_tokens) - len(matched)
        sequence.block_table = matched + self._take(sequence, count, after=matched[-1] if matched else 0)
        sequence.num_committed = len(matched)
        sequence.num_known_at_start = sequence.num_known
        if self._reads_cache(sequence):
            for name in sequence.block_hashes[len(matched) : self._num_shareable(sequence)]:
                self._computing.setdefault(name, sequence)

    def _share(self, blocks: NDArray[np.int64]) -> None:
        # a cached prefix has no block twice
        references = self._references[blocks]
        self._free.remove(blocks[references == 0])
        self._references[blocks] = references + 1
        self._popular[blocks] = True

    def _take(self, sequence: Sequence, count: int, *, after: int) -> list[int]:
        room = min(MAX_ROOM, (sequence.request.params.max_tokens - sequence.num_output) // self.block_size)
        taken = self._free.pop(count, after=after, room=room)
        self._references[taken] = 1
        self._forget(taken)
        return taken

    def _forget(self, blocks: list[int]) -> None:
        hashes = self._hashes
        for block in blocks:
            name = hashes[block]
            if name is not None:
                del self._cached[name]
                hashes[block] = None
                self._popular[block] = False

    def _stop_computing(self, sequence: Sequence) -> None:
        if self._computing:
            for name in sequence.block_hashes[sequence.num_committed :]:
                if self._computing.get(name) is sequence:
                    del self._computing[name]

    def _fence(self, step_id: int, device_blocks: list[int], host_blocks: list[int]) -> None:
        if step_id <= self._completed:
            self._release([device_blocks])
            self._free_host += host_blocks
        elif device_blocks or host_blocks:
            self.num_fenced_blocks += len(device_blocks)
            self._fences.append((step_id, device_blocks, host_blocks))

    def _release(self, tables: Iterable[list[int]]) -> None:
        # all go to the free list together, in the order in which their last owners let them go
        empty, cached, hashes = list[int](), list[int](), self._hashes
        for table in tables:
            # no table has a block twice
            blocks = np.array(table, dtype=np.int64)
            references = self._references[blocks] - 1
            self._references[blocks] = references
            for block in blocks[references == 0].tolist():
                (empty if hashes[block] is None else cached).append(block)
        self._free.push_first(empty)
        self._free.push_last(cached, kept=self._popular[cached])
