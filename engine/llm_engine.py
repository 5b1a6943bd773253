"""The engine's only door: add, abort, step, capacity. One thread calls it."""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.capacity import Capacity
from engine.compiling import Compiling
from engine.errors import DeviceLost, EmptyPrompt, EngineError, InvalidParams, PromptTooLong, RequestError
from engine.faults import is_lost, is_out_of_memory, release_cached_memory
from engine.grammar_compiler import CompiledGrammar, GrammarCompiler
from engine.output import OutputProcessor
from engine.request import (
    BULK,
    Completion,
    FinishReason,
    Progress,
    Request,
    RequestOutput,
    Runner,
    Sequence,
    Status,
    Step,
    StepOutputs,
    StepResult,
    TextDelta,
    Ticket,
    TokenIds,
    TokenLogprob,
)
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.shedding import Shedding
from engine.stats import EngineStats
from engine.tokenizer import Tokenizer


@dataclass(slots=True)
class _Live:
    """
    A request that is not finished, with what has come out of it.

    Args:
        lead: The answer that speaks for all where they do the same: the first that computes the prompt.
        started: It has been in a step.
    """

    request: Request
    sequences: tuple[Sequence, ...]
    lead: Sequence
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    started: bool = False

    @property
    def answered(self) -> bool:
        """Whether it has a token that was made here."""
        return any(sequence.num_output > len(sequence.resumed.token_ids) for sequence in self.sequences)


class LLMEngine:
    """
    Runs requests to their end, many at a time.

    `step` is one turn: plan the next step, launch it, and handle the oldest one in flight.
    With `depth` 2 a device computes one step while this thread handles the one before.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        outputs: OutputProcessor,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        model_name: str,
        fingerprint: str,
        depth: int = 1,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.fingerprint = fingerprint
        self.max_model_len = scheduler.max_model_len
        self.max_num_seqs = scheduler.max_num_seqs
        self.max_num_batched_tokens = scheduler.max_num_batched_tokens
        self.kv_tokens = scheduler.capacity().total_tokens
        self._scheduler = scheduler
        self._runner = runner
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._depth = depth
        self._shedding = Shedding()

        # all the mutable state there is
        self._live: dict[str, _Live] = {}
        self._compiling = Compiling(grammars)
        self._in_flight: deque[tuple[Step, Ticket]] = deque()
        self._finished: list[RequestOutput] = []
        self._started: list[str] = []
        self._answered: list[str] = []
        # those that have started and have no token yet
        self._unanswered: dict[str, _Live] = {}
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._num_steps = 0

    def add(self, request: Request) -> None:
        """
        Queue a request; it runs with the next steps. One with a grammar waits until that is compiled.

        Raises:
            EmptyPrompt: the prompt has no token.
            PromptTooLong: no answer token would fit.
            InvalidParams: a token id is not in the vocabulary, or the id is in use.
            InvalidGrammar, GrammarsUnavailable: its grammar cannot be followed; a step may say so later.
        """
        self._check(request)
        if request.params.grammar is None:
            self._enter(request, None)
        elif (compiled := self._compiling.add(request)) is not None:
            self._enter(request, compiled)

    def _enter(self, request: Request, compiled: CompiledGrammar | None) -> None:
        params = request.params
        states = [compiled.start(params) if compiled else None for _ in range(params.n)]
        sequences = tuple(Sequence(request, index, state) for index, state in enumerate(states))
        live = _live(request, sequences)
        self._live[request.request_id] = live
        self._prompt_tokens += len(request.prompt)
        for sequence in sequences:
            reason = self._outputs.begin(sequence)
            if reason is None:
                self._scheduler.add(sequence)
            else:
                # its last token had been generated before it came here
                sequence.status, sequence.finish_reason = Status.FINISHED, reason
                self._end(live, sequence, reason)
        live.lead = next((sequence for sequence in sequences if not sequence.finished), live.lead)
        # now, as the request may be aborted before the next step
        self._end_overgrown()

    def abort(self, request_id: str) -> RequestOutput | None:
        """
        End a request now and return what it has; None if it is not here.
        """
        if (waiting := self._compiling.take(request_id)) is not None:
            # with what it brings from another engine
            return self._unstarted(waiting)
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self._unanswered.pop(request_id, None)
        for sequence in live.sequences:
            if not sequence.finished:
                self._scheduler.abort(sequence)
                live.completions.append(self._outputs.completion(sequence))
        return self._output(live)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight or self._finished or self._compiling)

    def step(self) -> StepOutputs:
        """
        Take one turn and return what has come out by it.

        A step for which the device has no memory is tried again with less of what runs.

        Raises:
            DeviceFull: less did not help. DeviceLost: nothing works on the device any more.
            EngineError: requests are left and none of them can ever run; a fault of the engine.
        """
        rejected = self._take_compiled() if self._compiling else ()
        step = self._scheduler.schedule()
        deltas: list[TextDelta] = []
        full = False
        try:
            self._advance(step, deltas)
        except RuntimeError as error:
            if is_lost(error):
                raise DeviceLost(str(error)) from error
            if not is_out_of_memory(error):
                raise
            full = True
        # not above: the error holds on to what the step had in memory
        if full:
            self._shed(step)
        self._end_overgrown()
        outputs = StepOutputs(
            tuple(self._finished), tuple(deltas), rejected, tuple(self._started), tuple(self._answered)
        )
        for sent in (self._finished, self._started, self._answered):
            sent.clear()
        return outputs

    def generate(
        self, prompts: Iterable[str | TokenIds], params: SamplingParams | SequenceOf[SamplingParams]
    ) -> list[RequestOutput]:
        """
        Run prompts (texts, or arrays of token ids) to their end, as bulk, and return the outputs in order.

        For an engine that nobody else feeds: outputs of other requests are dropped.

        Raises:
            RequestError: for the first prompt that cannot be served; none of them runs then.
            EngineError: a text was given and the model folder has no tokenizer.
        """
        requests = []
        for index, prompt in enumerate(prompts):
            chosen = params if isinstance(params, SamplingParams) else params[index]
            requests.append(Request(f"generate-{index}", self._encode(prompt), chosen, priority=BULK))
        for request in requests:
            self._check(request)
        for request in requests:
            self.add(request)
        done: dict[str, RequestOutput] = {}
        while len(done) < len(requests):
            outputs = self.step()
            for _, error in outputs.rejected:
                raise error
            done |= {output.request_id: output for output in outputs.finished}
        return [done[request.request_id] for request in requests]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as a benchmark does between repeats."""
        self._scheduler.blocks.reset_cache()

    def progress(self, known: Mapping[str, SequenceOf[int]]) -> dict[str, list[Progress]]:
        """
        What each answer of some requests has; requests that are not here are left out.

        Args:
            known: By request, how many tokens of each answer the caller has already: these are left out too.
        """
        return {
            request_id: [self._progress(live, *one) for one in zip(live.sequences, starts, strict=True)]
            for request_id, starts in known.items()
            if (live := self._live.get(request_id)) is not None
        }

    def num_started(self, request_id: str) -> int:
        """Answers of a request that have computed something; 0 also when it is not here."""
        live = self._live.get(request_id)
        return sum(1 for s in live.sequences if s.num_computed or s.num_output) if live else 0

    def capacity(self) -> Capacity:
        """What could be added now and start at once."""
        return self._compiling.counted_in(self._scheduler.capacity())

    def stats(self) -> EngineStats:
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            kv_usage=blocks.usage,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_steps=self._num_steps,
            num_preemptions=sum(scheduler.num_preemptions.values()),
            num_sheds=self._shedding.num_sheds,
            prefix_hit_tokens=blocks.hit_tokens,
            prefix_query_tokens=blocks.query_tokens,
        )

    def __repr__(self) -> str:
        scheduler = self._scheduler
        return (
            f"LLMEngine({scheduler.num_running} running, {scheduler.num_waiting} waiting, "
            f"{scheduler.num_swapped} swapped, {scheduler.blocks.num_free_blocks} free blocks)"
        )

    def _encode(self, prompt: str | TokenIds) -> TokenIds:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise EngineError("this model folder has no tokenizer.json: give token ids")
        return self.tokenizer.encode(prompt)

    def _check(self, request: Request) -> None:
        length = len(request.prompt)
        if request.request_id in self._live or request.request_id in self._compiling:
            raise InvalidParams(f"request id {request.request_id!r} is in use")
        if length == 0:
            raise EmptyPrompt("the prompt has no token: give at least one")
        if length >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {length:,} tokens and with one answer token the model takes {self.max_model_len:,}: "
                "shorten it, set options.truncate, or start the worker with a larger --max-model-len"
            )
        params = request.params
        named = (*params.logit_bias, *params.stop_token_ids, int(request.prompt.min()), int(request.prompt.max()))
        outside = next((token for token in named if not 0 <= token < self._vocab_size), None)
        if outside is not None:
            raise InvalidParams(f"token id {outside} is not in the vocabulary of {self._vocab_size:,}")

    def _take_compiled(self) -> tuple[tuple[str, RequestError], ...]:
        """Take in requests whose grammars are compiled; those that were refused, with the reason."""
        rejected = []
        idle = not (self._live or self._in_flight or self._finished)
        for request, outcome in self._compiling.ready(wait_for_one=idle):
            if isinstance(outcome, RequestError):
                rejected.append((request.request_id, outcome))
            else:
                self._enter(request, outcome)
        return tuple(rejected)

    def _unstarted(self, request: Request) -> RequestOutput:
        """The output of a request that is aborted before it has come to the scheduler."""
        sequences = tuple(Sequence(request, index) for index in range(request.params.n))
        live = _live(request, sequences)
        for sequence in sequences:
            sequence.finish_reason = self._outputs.begin(sequence) or FinishReason.ABORT
            live.completions.append(self._outputs.completion(sequence))
        return self._output(live)

    def _progress(self, live: _Live, sequence: Sequence, start: int) -> Progress:
        token_ids = tuple(sequence.token_ids(sequence.num_prompt_tokens + start, sequence.num_known).tolist())
        if not sequence.finished:
            return Progress(token_ids, self._outputs.logprobs(sequence, start))
        completion = next(one for one in live.completions if one.index == sequence.index)
        # one that failed may succeed elsewhere
        failed = completion.finish_reason is FinishReason.ERROR
        return Progress(token_ids, (completion.logprobs or ())[start:], None if failed else completion.finish_reason)

    def _advance(self, step: Step | None, deltas: list[TextDelta]) -> None:
        """Launch a step, and handle the oldest in flight when the pipe is full or nothing could run."""
        if step is not None:
            self._in_flight.append((step, self._runner.launch(step)))
            self._num_steps += 1
            self._note_started(step)
        if self._in_flight and (step is None or len(self._in_flight) >= self._depth):
            self._handle(deltas)
        elif step is None and self._live and not self._scheduler.overgrown:
            raise EngineError(f"nothing can run, though {len(self._live)} requests are not finished: {self!r}")

    def _note_started(self, step: Step) -> None:
        for chunk in step.prefill_chunks:
            if not chunk.join:
                continue
            name = chunk.sequence.request.request_id
            if (live := self._live.get(name)) is not None and not live.started:
                live.started = True
                self._started.append(name)
                self._unanswered[name] = live

    def _note_answered(self) -> None:
        # few: one that has started is answered as soon as its prompt is computed
        for name in [name for name, live in self._unanswered.items() if live.answered]:
            del self._unanswered[name]
            self._answered.append(name)

    def _shed(self, step: Step | None) -> None:
        """Give up the steps in flight, of which the device had no memory for one, and run less from now on."""
        scheduler = self._scheduler
        failed = [launched for launched, _ in self._in_flight]
        self._in_flight.clear()
        if step is not None and step not in failed:
            failed.append(step)
        for one in failed:
            scheduler.abandon(one)
        limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        scheduler.shrink(*self._shedding.halve(*limits, self._num_steps))
        release_cached_memory()

    def _handle(self, deltas: list[TextDelta]) -> None:
        """Take in the oldest step's result: its tokens, its log-probabilities, and who ended by them."""
        step, ticket = self._in_flight[0]
        result = ticket.result()
        self._in_flight.popleft()
        # before anyone ends: a short answer may end in the step that computes its prompt
        self._keep_prompt_logprobs(step, result)
        logprobs = dict(zip(step.sampled, result.logprobs, strict=True)) if result.logprobs else {}
        arrived = self._scheduler.complete(step, result.token_ids)
        self._generated_tokens += len(arrived.token_ids)
        if self._unanswered:
            self._note_answered()
        for row in self._outputs.notable(arrived):
            sequence, token_id = arrived.sequences[row], int(arrived.token_ids[row])
            live = self._live[sequence.request.request_id]
            if token_id < 0:
                self._generated_tokens -= 1
                self._end(live, sequence, FinishReason.ERROR)
                continue
            reason = self._outputs.push(sequence, token_id, logprobs.get(sequence))
            if sequence.request.stream:
                deltas += self._outputs.deltas(sequence, ended=reason is not None)
            if reason is not None:
                self._end(live, sequence, reason)

    def _keep_prompt_logprobs(self, step: Step, result: StepResult) -> None:
        for index, entries in result.prompt_logprobs.items():
            chunk = step.chunks[index]
            live = self._live.get(chunk.sequence.request.request_id)
            if live is None or live.prompt_logprobs is None:
                continue
            # an aborted request's id may be another's
            if live.lead is chunk.sequence:
                live.prompt_logprobs[chunk.start + 1 : chunk.start + 1 + len(entries)] = entries

    def _end_overgrown(self) -> None:
        overgrown, self._scheduler.overgrown = self._scheduler.overgrown, []
        for sequence in overgrown:
            self._end(self._live[sequence.request.request_id], sequence, FinishReason.LENGTH)

    def _end(self, live: _Live, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence, reason)
        live.completions.append(self._outputs.completion(sequence))
        if len(live.completions) == len(live.sequences):
            del self._live[live.request.request_id]
            self._unanswered.pop(live.request.request_id, None)
            self._finished.append(self._output(live))

    def _output(self, live: _Live) -> RequestOutput:
        return RequestOutput(
            request_id=live.request.request_id,
            completions=tuple(sorted(live.completions, key=lambda completion: completion.index)),
            num_prompt_tokens=len(live.request.prompt),
            num_cached_tokens=live.lead.num_cached,
            prompt_logprobs=None if live.prompt_logprobs is None else tuple(live.prompt_logprobs),
            num_preemptions=sum(sequence.num_preemptions for sequence in live.sequences),
        )


def _live(request: Request, sequences: tuple[Sequence, ...]) -> _Live:
    live = _Live(request, sequences, lead=sequences[0])
    if request.params.prompt_logprobs is not None:
        live.prompt_logprobs = [None] * len(request.prompt)
    return live
