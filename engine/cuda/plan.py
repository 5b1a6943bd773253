"""A step as one run of int32 numbers: all that the device has to be told."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import Chunk, Sequence, Step
from engine.state import knob_row
from kernels.random_draws import stream_words
from kernels.step_state import JOIN_COLUMNS, KNOBS

Int32s = NDArray[np.int32]

# keys that one call gathers from behind prefixes: 64 Ki of 8 heads of 128 in bf16 are 256 MiB
MAX_GATHERED_KEYS = 65_536
# chunks of a step that one launch attends though some have no prefix: a tile for each place in the longest is
# launched for all of them, which for many short ones costs more than a second launch
MOST_TOGETHER = 8
# numbers in 16 bytes: kernels are compiled anew for an address that is not a multiple of it
ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class Section:
    """Where numbers of one kind lie in the packed step."""

    start: int
    count: int

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.count)


@dataclass(frozen=True, slots=True)
class PrefillSections:
    """
    Chunks that one attention call computes.

    Args:
        query_start, key_start: [num_chunks + 1]; the same section where no chunk has a prefix.
        slots: [num_chunks].
        num_keys: Of all chunks; max_query and max_key of the longest.
    """

    query_start: Section
    key_start: Section
    slots: Section
    num_tokens: int
    num_keys: int
    max_query: int
    max_key: int


@dataclass(frozen=True, slots=True)
class PackedPrefill:
    """
    The chunks of a step that bring their tokens: those that start a sequence, then those behind a prefix.

    A few of both are attended together, which leaves multiprocessors idle at the end of one launch and not of two.

    Args:
        joins: [n * JOIN_COLUMNS].
        places, blocks: Entries of the block tables of those that join (slot * max_blocks + index), and what they
            become. No other chunk's table has grown: it holds the whole prompt.
        moved, computed: Slots, and how many of their tokens are computed after this step.
        input_ids, positions, slot_mapping: Of these chunks' tokens.
        fresh: Chunks that are attended where they were computed.
        behind: Runs of others, which are attended in the cache.
        sample_rows: Rows that sample among all token rows of the step: decodes come first.
        order: [num_sampling], place in `Step.sampled` of each row that samples.
        first_rows: By place in `Step.prefill_chunks`, the chunk's first token row.
    """

    num_tokens: int
    joins: Section
    places: Section
    blocks: Section
    moved: Section
    computed: Section
    input_ids: Section
    positions: Section
    slot_mapping: Section
    sample_rows: Section
    fresh: PrefillSections | None
    behind: tuple[PrefillSections, ...]
    order: NDArray[np.int64]
    first_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """
    A step in the device's words.

    Args:
        count: Numbers of the step, from the first.
        slots: Of the sequences that sample: decodes, then prefill chunks. A view of the numbers, the first.
        num_decodes: Sequences whose one token is on the device already.
        prefill: None where there are decodes alone, which then are in the order of the step.
    """

    count: int
    slots: Int32s
    num_decodes: int
    prefill: PackedPrefill | None


class _Numbers:
    """Sections one after the other, from `count` on; what stands in the gaps between them means nothing."""

    def __init__(self, numbers: Int32s, count: int) -> None:
        self._numbers = numbers
        self.count = count

    def add(self, values: Int32s | SequenceOf[int]) -> Section:
        part = np.asarray(values, dtype=np.int32).ravel()
        section = Section(self.count, len(part))
        self._numbers[section.place] = part
        self.count += _aligned(len(part))
        return section


class StepPacker:
    """
    Packs steps; keeps nothing of them.

    The numbers begin with a head, at places that graphs know: from 0 on the slots of the rows that
    sample, from `fresh_start` on the newest block of each decode. It is all that decodes alone need.

    Args:
        max_blocks: Columns of the device's block tables.
        num_reserved: Numbers right behind the head that others fill in.
    """

    def __init__(
        self, *, max_num_seqs: int, max_blocks: int, block_size: int, vocab_size: int, num_reserved: int = 0
    ) -> None:
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.padding_slot = max_num_seqs
        self.fresh_start = _aligned(max_num_seqs)
        self.head_count = head_count_for(max_num_seqs)
        self.prefill_start = self.head_count + _aligned(num_reserved)

    def most_numbers(self, max_num_batched_tokens: int) -> int:
        """The longest that a step of so many tokens can get."""
        # of each sequence a join, a table, three numbers and, where each is a part of its own, three sections
        each = JOIN_COLUMNS + 2 * self.max_blocks + 3 + 3 * ALIGNMENT
        # of each token its id, position and slot; and the gaps behind the nine sections that prefills always have
        return self.prefill_start + 3 * max_num_batched_tokens + self.padding_slot * each + 9 * (ALIGNMENT - 1)

    def pack(self, step: Step, numbers: Int32s) -> PackedStep:
        """
        Lay a step out. Rows behind those that sample are padding.

        Args:
            step: At least one chunk.
            numbers: Filled in; as long as `most_numbers` says.
        """
        decodes = step.decodes
        num_decodes = num_sampling = len(decodes)
        numbers[:num_decodes] = decodes.slots
        numbers[self.fresh_start : self.fresh_start + num_decodes] = decodes.blocks
        prefill, count = None, self.head_count
        if step.prefill_chunks:
            prefills = sorted(step.prefill_chunks, key=_has_prefix)
            sampled = [chunk.sequence.slot for chunk in prefills if chunk.samples]
            num_sampling += len(sampled)
            numbers[num_decodes:num_sampling] = sampled
            behind_head = _Numbers(numbers, self.prefill_start)
            prefill = self._prefill(step, behind_head, prefills)
            count = behind_head.count
        if num_sampling < self.fresh_start:
            numbers[num_sampling : self.fresh_start] = self.padding_slot
        return PackedStep(count, numbers[:num_sampling], num_decodes, prefill)

    def _prefill(self, step: Step, numbers: _Numbers, prefills: SequenceOf[Chunk]) -> PackedPrefill:
        num_decodes = step.num_decodes
        joining = [chunk for chunk in prefills if chunk.join]
        samplers = [chunk for chunk in step.prefill_chunks if chunk.samples]
        places = {id(chunk): num_decodes + place for place, chunk in enumerate(samplers)}
        order, sample_rows = list(range(num_decodes)), list(range(num_decodes))
        first_rows: dict[int, int] = {}
        row = num_decodes
        for chunk in prefills:
            first_rows[id(chunk)] = row
            row += chunk.length
            if chunk.samples:
                sample_rows.append(row - 1)
                order.append(places[id(chunk)])
        fresh, behind = _parted(prefills)
        return PackedPrefill(
            num_tokens=row - num_decodes,
            joins=numbers.add(self._joins(joining)),
            places=numbers.add([place for chunk in joining for place in self._table_places(chunk.sequence)]),
            blocks=numbers.add([block for chunk in joining for block in chunk.sequence.block_table]),
            moved=numbers.add([chunk.sequence.slot for chunk in prefills]),
            computed=numbers.add([chunk.start + chunk.length for chunk in prefills]),
            input_ids=numbers.add(np.concatenate([_token_ids(chunk) for chunk in prefills])),
            positions=numbers.add(np.concatenate([_positions(chunk) for chunk in prefills])),
            slot_mapping=numbers.add(np.concatenate([self._cache_slots(chunk) for chunk in prefills])),
            sample_rows=numbers.add(sample_rows),
            fresh=_sections(numbers, fresh) if fresh else None,
            behind=tuple(_sections(numbers, run) for run in _split(behind)),
            order=np.array(order, dtype=np.int64),
            first_rows=tuple(first_rows[id(chunk)] for chunk in step.prefill_chunks),
        )

    def _joins(self, joining: SequenceOf[Chunk]) -> Int32s:
        rows = np.empty((len(joining), JOIN_COLUMNS), dtype=np.int32)
        for row, chunk in zip(rows, joining, strict=True):
            sequence = chunk.sequence
            params = sequence.params
            # everything it has is known: a sequence joins only when nothing of it is in flight
            last = sequence.output[-1] if sequence.output else int(sequence.prompt[-1])
            row[:KNOBS] = (
                sequence.slot,
                chunk.start,
                last,
                len(sequence.output),
                *stream_words(params.seed, sequence.index),
                min(params.top_k, self.vocab_size),
            )
            row[KNOBS:].view(np.float32)[:] = knob_row(params)
        return rows

    def _table_places(self, sequence: Sequence) -> range:
        start = sequence.slot * self.max_blocks
        return range(start, start + len(sequence.block_table))

    def _cache_slots(self, chunk: Chunk) -> Int32s:
        positions = _positions(chunk)
        table = np.asarray(chunk.sequence.block_table, dtype=np.int32)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size


def head_count_for(max_num_seqs: int) -> int:
    """Numbers of the head: two for each row."""
    return 2 * _aligned(max_num_seqs)


def _aligned(count: int) -> int:
    return count + -count % ALIGNMENT


def _has_prefix(chunk: Chunk) -> bool:
    return chunk.start > 0


def _parted(chunks: SequenceOf[Chunk]) -> tuple[SequenceOf[Chunk], SequenceOf[Chunk]]:
    """Those that are attended where they were computed, and those that are attended in the cache."""
    count = sum(not _has_prefix(chunk) for chunk in chunks)
    if count < len(chunks) <= MOST_TOGETHER:
        count = 0
    return chunks[:count], chunks[count:]


def _split(chunks: SequenceOf[Chunk]) -> list[list[Chunk]]:
    """Chunks in runs whose keys can be gathered at once; a single long one is a run too."""
    runs: list[list[Chunk]] = []
    room = 0
    for chunk in chunks:
        num_keys = chunk.start + chunk.length
        if not runs or num_keys > room:
            runs.append([])
            room = MAX_GATHERED_KEYS
        runs[-1].append(chunk)
        room -= num_keys
    return runs


def _sections(numbers: _Numbers, chunks: SequenceOf[Chunk]) -> PrefillSections:
    lengths = [chunk.length for chunk in chunks]
    query_start = numbers.add(np.cumsum([0, *lengths]))
    totals = [chunk.start + chunk.length for chunk in chunks]
    key_start = query_start if totals == lengths else numbers.add(np.cumsum([0, *totals]))
    return PrefillSections(
        query_start=query_start,
        key_start=key_start,
        slots=numbers.add([chunk.sequence.slot for chunk in chunks]),
        num_tokens=sum(lengths),
        num_keys=sum(totals),
        max_query=max(lengths),
        max_key=max(totals),
    )


def _token_ids(chunk: Chunk) -> Int32s:
    return chunk.sequence.token_ids(chunk.start, chunk.start + chunk.length)


def _positions(chunk: Chunk) -> Int32s:
    return np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32)
