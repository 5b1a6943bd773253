"""A step as one run of int32 numbers: all that the device has to be told."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import Chunk, Step
from engine.state import knob_row
from kernels.random_draws import stream_words
from kernels.step_state import JOIN_COLUMNS, KNOBS

Int32s = NDArray[np.int32]

# keys that one call gathers from behind prefixes: 64 Ki of 8 heads of 128 in bf16 are 256 MiB
MAX_GATHERED_KEYS = 65_536
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

    Args:
        moved, computed: Slots, and how many of their tokens are computed after this step.
        input_ids, positions, slot_mapping: Of these chunks' tokens.
        sample_rows: Rows that sample among all token rows of the step: decodes come first.
        order: [num_sampling], place in `Step.sampled` of each row that samples.
        first_rows: By place in `Step.prefill_chunks`, the chunk's first token row.
    """

    num_tokens: int
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
        numbers: What is sent.
        slots: Of the sequences that sample: decodes, then prefill chunks. It lies first, at 0.
        num_decodes: Sequences whose one token is on the device already.
        joins: [n * JOIN_COLUMNS].
        places, blocks: Entries of the block tables (slot * max_blocks + index) and what they become.
        prefill: None where there are decodes alone, which then are in the order of the step.
    """

    numbers: Int32s
    slots: Section
    num_decodes: int
    joins: Section
    places: Section
    blocks: Section
    prefill: PackedPrefill | None


class _Numbers:
    """Sections one after the other."""

    def __init__(self) -> None:
        self.parts: list[Int32s] = []
        self.count = 0

    def add(self, values: Int32s | SequenceOf[int]) -> Section:
        part = np.asarray(values, dtype=np.int32).ravel()
        section = Section(self.count, len(part))
        self.parts.append(part)
        self.count += len(part)
        gap = -self.count % ALIGNMENT
        if gap:
            self.parts.append(np.zeros(gap, dtype=np.int32))
            self.count += gap
        return section

    def joined(self) -> Int32s:
        return np.concatenate(self.parts)


class StepPacker:
    """
    Packs steps, and knows which blocks of each slot the device has been told.

    Args:
        max_blocks: Columns of the device's block tables.
    """

    def __init__(self, *, max_num_seqs: int, max_blocks: int, block_size: int, vocab_size: int) -> None:
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.padding_slot = max_num_seqs
        # all the mutable state there is: by slot, the length of the table that was sent
        self._sent = [0] * max_num_seqs

    def most_numbers(self, max_num_batched_tokens: int) -> int:
        """The longest that a step of so many tokens can get."""
        # of each sequence a join, a table, its slot four times and, where each is a part of its own, three sections
        each = JOIN_COLUMNS + 2 * self.max_blocks + 4 + 3 * ALIGNMENT
        # of each token its id, position and slot; and the gaps behind the ten sections that are always there
        return 3 * max_num_batched_tokens + self.padding_slot * each + 10 * (ALIGNMENT - 1)

    def pack(self, step: Step, num_padding: int = 0) -> PackedStep:
        """
        Lay a step out.

        Args:
            step: At least one chunk; steps come in the order of their launches.
            num_padding: Rows of padding behind the decodes of a step that has nothing else.
        """
        prefills = sorted(step.prefill_chunks, key=_has_prefix)
        numbers = _Numbers()
        sampled = [chunk.sequence.slot for chunk in prefills if chunk.samples]
        rows = sampled or [self.padding_slot] * num_padding
        numbers.add(np.concatenate([step.decode_slots, rows]) if rows else step.decode_slots)
        slots = Section(0, step.num_decodes + len(sampled))
        joins = numbers.add(self._joins(prefills))
        places, blocks = self._new_blocks(step, prefills)
        sections = numbers.add(places), numbers.add(blocks)
        prefill = self._prefill(step, numbers, prefills) if prefills else None
        return PackedStep(numbers.joined(), slots, step.num_decodes, joins, *sections, prefill)

    def _prefill(self, step: Step, numbers: "_Numbers", prefills: SequenceOf[Chunk]) -> PackedPrefill:
        num_decodes = step.num_decodes
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
        fresh = [chunk for chunk in prefills if not chunk.start]
        behind = _split(prefills[len(fresh) :])
        return PackedPrefill(
            num_tokens=row - num_decodes,
            moved=numbers.add([chunk.sequence.slot for chunk in prefills]),
            computed=numbers.add([chunk.start + chunk.length for chunk in prefills]),
            input_ids=numbers.add(np.concatenate([_token_ids(chunk) for chunk in prefills])),
            positions=numbers.add(np.concatenate([_positions(chunk) for chunk in prefills])),
            slot_mapping=numbers.add(np.concatenate([self._cache_slots(chunk) for chunk in prefills])),
            sample_rows=numbers.add(sample_rows),
            fresh=_sections(numbers, fresh) if fresh else None,
            behind=tuple(_sections(numbers, run) for run in behind),
            order=np.array(order, dtype=np.int64),
            first_rows=tuple(first_rows[id(chunk)] for chunk in step.prefill_chunks),
        )

    def _joins(self, chunks: SequenceOf[Chunk]) -> Int32s:
        joining = [chunk for chunk in chunks if chunk.join]
        rows = np.empty((len(joining), JOIN_COLUMNS), dtype=np.int32)
        for row, chunk in zip(rows, joining, strict=True):
            sequence = chunk.sequence
            params = sequence.params
            self._sent[sequence.slot] = 0
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

    def _new_blocks(self, step: Step, prefills: SequenceOf[Chunk]) -> tuple[list[int], list[int]]:
        places: list[int] = []
        blocks: list[int] = []
        # a decode's table grows with the first token of a block alone
        entering = np.flatnonzero(step.decode_starts % self.block_size == 0).tolist()
        growing = [step.decodes.sequences[place] for place in entering] + [chunk.sequence for chunk in prefills]
        for sequence in growing:
            slot, table = sequence.slot, sequence.block_table
            first, stop = self._sent[slot], len(table)
            if first < stop:
                start = slot * self.max_blocks
                places += range(start + first, start + stop)
                blocks += table[first:]
                self._sent[slot] = stop
        return places, blocks

    def _cache_slots(self, chunk: Chunk) -> Int32s:
        positions = _positions(chunk)
        table = np.asarray(chunk.sequence.block_table, dtype=np.int32)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size


def _has_prefix(chunk: Chunk) -> bool:
    return chunk.start > 0


def _split(chunks: SequenceOf[Chunk]) -> list[list[Chunk]]:
    """Chunks behind prefixes in runs whose keys can be gathered at once; a single long one is a run too."""
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
