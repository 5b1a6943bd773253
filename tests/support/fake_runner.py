"""A runner without a model: it keeps what each KV block would hold, and fails at any read of the wrong thing."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from engine.request import BlockCopy, Chunk, FinishReason, Sequence, Step, StepResult
from engine.scheduler import Scheduler

# the whole history of a token in one number: equal for equal salt and tokens up to there
Digest = int
Cells = list[Digest | None]


def answer_token(request_id: str, index: int, position: int) -> int:
    """The token that the fake model puts at a position, whatever ran before or beside it."""
    return crc32(f"{request_id}#{index}@{position}".encode()) % 997


@dataclass(slots=True)
class _Launched:
    """Which sequences read or wrote which block in a step that has not been waited for."""

    step_id: int
    token_ids: list[int] = field(default_factory=list)
    writers: dict[int, Sequence] = field(default_factory=dict)
    readers: dict[int, set[Sequence]] = field(default_factory=dict)
    host_reads: set[int] = field(default_factory=set)


class FakeTicket:
    """A launched step; results are taken in the order of launches."""

    def __init__(self, runner: "FakeRunner", launched: _Launched) -> None:
        self._runner = runner
        self._launched = launched

    def result(self) -> StepResult:
        """Return the step's tokens; from now on its blocks may be written by others."""
        oldest = self._runner.in_flight.popleft()
        assert oldest is self._launched, f"step {self._launched.step_id} taken before step {oldest.step_id}"
        return StepResult(np.array(self._launched.token_ids, dtype=np.int64))


class FakeRunner:
    """
    Performs steps on digests instead of keys and values.

    Each cell of a block holds the digest of the tokens up to the one it belongs to. A chunk
    must find the right digest in every cell before it, and may write only to blocks that no
    other sequence touches in this step or in one still in flight.

    Args:
        bad_positions: (request id, index, position) whose logits are not finite.
        token_of: The model: (request id, index, position) to the token there.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        bad_positions: frozenset[tuple[str, int, int]] = frozenset(),
        token_of: Callable[[str, int, int], int] = answer_token,
    ) -> None:
        self.block_size = block_size
        self.token_of = token_of
        self.bad_positions = bad_positions
        self.in_flight: deque[_Launched] = deque()
        self.num_computed_tokens = 0
        self.num_copied_blocks = 0
        self._device: list[Cells] = [[None] * block_size for _ in range(num_blocks)]
        self._host: list[Cells] = [[None] * block_size for _ in range(num_host_blocks)]
        self._slots: dict[int, Sequence] = {}
        self._last_token: dict[int, int] = {}
        self._histories: dict[Sequence, list[Digest]] = {}
        # prompt tokens whose logits were computed, of sequences that ask for their log-probabilities
        self._prompt_logits: dict[Sequence, int] = {}

    def launch(self, step: Step) -> FakeTicket:
        """Perform a step at once, in the order of launches, as a device's stream does."""
        launched = _Launched(step.step_id)
        for slot in step.left:
            # one that joined in a step that failed may never have come here
            self._slots.pop(slot, None)
        for copy in step.swap_out:
            self._swap_out(copy)
        for copy in step.swap_in:
            self._swap_in(copy, launched)
        twice = [s for s, count in Counter(chunk.sequence.slot for chunk in step.chunks).items() if count > 1]
        assert not twice, f"slots {twice} twice in step {step.step_id}"
        for chunk in step.chunks:
            self._compute(chunk, launched)
        self._check_conflicts(launched)
        self.in_flight.append(launched)
        return FakeTicket(self, launched)

    def _swap_out(self, copy: BlockCopy) -> None:
        reading = [late.step_id for late in self.in_flight if copy.host_block in late.host_reads]
        assert not reading, f"host block {copy.host_block} is overwritten while steps {reading} read it"
        self._host[copy.host_block] = list(self._device[copy.device_block])
        self.num_copied_blocks += 1

    def _swap_in(self, copy: BlockCopy, launched: _Launched) -> None:
        touching = [
            late.step_id
            for late in self.in_flight
            if copy.device_block in late.readers or copy.device_block in late.writers
        ]
        assert not touching, f"block {copy.device_block} is overwritten while steps {touching} use it"
        launched.host_reads.add(copy.host_block)
        self._device[copy.device_block] = list(self._host[copy.host_block])
        self.num_copied_blocks += 1

    def _compute(self, chunk: Chunk, launched: _Launched) -> None:
        sequence, size = chunk.sequence, self.block_size
        stop = chunk.start + chunk.length
        self._take_slot(chunk)
        history = self._history(sequence, stop)
        table = list(sequence.block_table)
        assert 0 not in table, f"{sequence} was given the null block"
        assert stop <= len(table) * size, f"{sequence} computes {stop} tokens in {len(table)} blocks"
        for position in range(chunk.start, stop):
            self._device[table[position // size]][position % size] = history[position]
        for block in table[chunk.start // size : -(-stop // size)]:
            assert block not in launched.writers, f"block {block} is written by two sequences"
            launched.writers[block] = sequence
        for index in range(-(-stop // size)):
            want = history[index * size : min(stop, (index + 1) * size)]
            have = self._device[table[index]][: len(want)]
            assert want == have, f"{sequence} reads block {table[index]} (its {index}th) and finds another's content"
            launched.readers.setdefault(table[index], set()).add(sequence)
        self.num_computed_tokens += chunk.length
        if sequence.params.prompt_logprobs is not None:
            seen = self._prompt_logits.get(sequence, 0)
            assert chunk.start <= seen, f"{sequence} skips the logits of prompt tokens {seen} to {chunk.start}"
            self._prompt_logits[sequence] = max(seen, stop)
        if chunk.samples:
            self._sample(sequence, stop, launched)

    def _take_slot(self, chunk: Chunk) -> None:
        slot = chunk.sequence.slot
        if chunk.join:
            assert slot not in self._slots, f"slot {slot} is taken by {self._slots[slot]}"
            self._slots[slot] = chunk.sequence
        assert self._slots.get(slot) is chunk.sequence, f"{chunk.sequence} never joined slot {slot}"

    def _sample(self, sequence: Sequence, position: int, launched: _Launched) -> None:
        key = (sequence.request.request_id, sequence.index, position)
        self._last_token[sequence.slot] = self.token_of(*key)
        launched.token_ids.append(-1 if key in self.bad_positions else self.token_of(*key))

    def _history(self, sequence: Sequence, stop: int) -> list[Digest]:
        history = self._histories.setdefault(sequence, [])
        start = len(history)
        if start >= stop:
            return history
        digest = history[-1] if history else hash(sequence.request.cache_salt)
        known = min(stop, sequence.num_known)
        tokens = sequence.token_ids(start, known).tolist() if start < known else []
        if stop > max(start, known):
            assert sequence.grammar is None, f"{sequence} goes on without the token that its grammar has to see"
            # a token in flight is known to the device alone
            assert stop - max(start, known) == 1, f"{sequence} computes tokens that nobody knows"
            tokens.append(self._last_token[sequence.slot])
        for token in tokens:
            digest = hash((digest, token))
            history.append(digest)
        return history

    def _check_conflicts(self, launched: _Launched) -> None:
        for block, sequence in launched.writers.items():
            for other in (*self.in_flight, launched):
                strangers = other.readers.get(block, set()) - {sequence}
                assert not strangers, f"{sequence} writes block {block} that {strangers} read in step {other.step_id}"
                writer = other.writers.get(block, sequence)
                assert writer is sequence, f"{sequence} and {writer} write block {block}"
        for block, readers in launched.readers.items():
            for late in self.in_flight:
                author = late.writers.get(block)
                assert author is None or readers == {author}, f"block {block} is shared before step {late.step_id} ends"


def run_to_length(sequence: Sequence, max_model_len: int) -> FinishReason | None:
    """End an answer at its max_tokens or at the model's length; the plainest of the engine's rules."""
    full = len(sequence.output) >= sequence.params.max_tokens or sequence.num_known >= max_model_len
    return FinishReason.LENGTH if full else None


def check_columns(step: Step) -> None:
    """Raise AssertionError when a step says one thing by chunk and another by column."""
    decodes = step.chunks[: step.num_decodes]
    assert all((chunk.length, chunk.samples, chunk.join) == (1, True, False) for chunk in decodes), f"{step} {decodes}"
    slots, starts = step.decodes.slots.tolist(), step.decodes.starts.tolist()
    assert slots == [chunk.sequence.slot for chunk in decodes], f"{step} {slots}"
    assert starts == [chunk.start for chunk in decodes], f"{step} {starts}"
    assert step.prefill_chunks == step.chunks[step.num_decodes :], f"{step} {step.prefill_chunks}"
    assert step.sampled == [chunk.sequence for chunk in step.sampling], f"{step} {step.sampled}"
    assert step.num_sampling == len(step.sampling), f"{step} samples {step.num_sampling}"
    assert step.num_tokens == sum(chunk.length for chunk in step.chunks), f"{step} has {step.num_tokens} tokens"


class Turns:
    """
    The engine's step loop without the engine.

    Args:
        depth: Steps in flight; results are taken that many steps late, less one.
        ends: Says after each token whether, and why, an answer ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: FakeRunner,
        *,
        depth: int = 1,
        ends: Callable[[Sequence, int], FinishReason | None] = run_to_length,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.ends = ends
        self.finished: list[Sequence] = []
        self._in_flight: deque[tuple[Step, FakeTicket]] = deque()

    def take(self) -> Step | None:
        """Plan and launch a step, then handle the oldest in flight when the pipe is full or nothing could run."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        if step is not None:
            assert step.chunks, f"step {step.step_id} is empty"
            assert scheduler.num_running <= scheduler.max_num_seqs, f"{scheduler.num_running} run"
            assert step.num_tokens <= scheduler.max_num_batched_tokens, f"{step.num_tokens} tokens in a step"
            check_columns(step)
            for sequence in (chunk.sequence for chunk in step.sampling):
                most = min(sequence.num_prompt_tokens + sequence.params.max_tokens, scheduler.max_model_len)
                assert sequence.num_tokens <= most, f"{sequence} goes past the {most} tokens that it may have"
            self._in_flight.append((step, self.runner.launch(step)))
        stuck = step is None and not self._in_flight and not scheduler.overgrown and scheduler.has_work
        assert not stuck, f"{scheduler.num_running} run, {scheduler.num_waiting} wait, and nothing can advance"
        if self._in_flight and (step is None or len(self._in_flight) >= self.depth):
            self._handle(*self._in_flight.popleft())
        self.finished += scheduler.overgrown
        scheduler.overgrown.clear()
        return step

    def run(self, *, max_turns: int = 100_000) -> list[Sequence]:
        """Take turns until nothing is left, and return the finished sequences in order."""
        for _ in range(max_turns):
            if not self.scheduler.has_work and not self._in_flight:
                return self.finished
            self.take()
        raise AssertionError(f"{self.scheduler.num_running} sequences still run after {max_turns} turns")

    def _handle(self, step: Step, ticket: FakeTicket) -> None:
        arrived = self.scheduler.complete(step, ticket.result().token_ids)
        for (sequence, token), last in zip(arrived, arrived.last.tolist(), strict=True):
            if token >= 0:
                assert last == (run_to_length(sequence, self.scheduler.max_model_len) is not None), f"{sequence} {last}"
            reason = FinishReason.ERROR if token < 0 else self.ends(sequence, self.scheduler.max_model_len)
            if reason is not None:
                self.scheduler.finish(sequence, reason)
                self.finished.append(sequence)
