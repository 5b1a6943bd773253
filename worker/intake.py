"""
From a delivery to a request: fetch, parse, check, render, tokenise, count.

Runs on a pool of threads and touches nothing but the object store. Every fault of a job is a
typed failure of that job alone.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import structlog

from engine.errors import EmptyPrompt, PromptTooLong, RequestError
from engine.grammar import Grammar
from engine.request import Progress, Request, TokenIds
from engine.sampling_params import SamplingParams
from pagemill.errors import InvalidJob, NewerVersion, ObjectNotFound, ObjectStoreError, StoreAway
from pagemill.json_schemas import with_json_patterns
from pagemill.logs import of_job
from pagemill.messages import Delivery
from pagemill.object_store import ObjectStore
from pagemill.schema import LANES, MAX_PAYLOAD_BYTES, Failure, Job, Options
from pagemill.trace_context import is_sampled_out
from pagemill.versions import SCHEMA_VERSION
from worker.checkpoints import FORMAT, BadCheckpoint, decode
from worker.engine_port import Tokenizer
from worker.retries import Fault

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job that the engine can take."""

    delivery: Delivery
    request: Request
    job: Job


@dataclass(frozen=True, slots=True)
class Refused:
    """A job that can never succeed, and why; `job` is None where it cannot even be read."""

    delivery: Delivery
    failure: Failure
    job: Job | None = None


@dataclass(frozen=True, slots=True)
class Deferred:
    """A job that cannot be read now, or not here: the kind of fault, and what it is in words."""

    delivery: Delivery
    fault: Fault
    why: str


Prepared = Accepted | Refused | Deferred


@dataclass(frozen=True, slots=True)
class Intake:
    """
    What turns deliveries into requests; shared by the threads of the pool.

    Args:
        models: Names that this worker answers to.
        fingerprint: Names model, weights, tokenizer and dtype: tokens of another are not resumed.
        store: Where large payloads lie; None where the operator gave none.
        shared_tenants: Tenants find each other's prompts in the prefix cache.
        version: The newest wire format that this worker takes.
        traced: Jobs have spans, but those whose producers record none.
    """

    tokenizer: Tokenizer
    models: frozenset[str]
    max_model_len: int
    fingerprint: str
    store: ObjectStore | None = None
    shared_tenants: bool = False
    version: int = SCHEMA_VERSION
    traced: bool = False

    def prepare(self, deliveries: Sequence[Delivery]) -> list[Prepared]:
        """Prepare each delivery by itself; in order, none left out."""
        return [self._prepare(delivery) for delivery in deliveries]

    def checkpoint_meta(self, prompt: TokenIds, grammar: Grammar | None = None) -> str:
        """What must be equal for a checkpoint to continue this prompt."""
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).hexdigest()
        # another version of the library may take other texts
        library = f":{_grammar_library()}" if grammar is not None else ""
        return f"{FORMAT}:{self.fingerprint}:{digest}{library}"

    def _prepare(self, delivery: Delivery) -> Prepared:
        job = None
        try:
            job = Job.parse(self._payload(delivery), self.version)
            request = self._request(delivery, job)
        except NewerVersion as error:
            return Deferred(delivery, "version", str(error))
        except (InvalidJob, RequestError) as error:
            return Refused(delivery, Failure.model_validate({"code": error.code, "message": str(error)}), job)
        except ObjectNotFound as error:
            return Refused(delivery, Failure(code="lost_payload", message=str(error)))
        except StoreAway as error:
            return Deferred(delivery, "store", str(error))
        except ObjectStoreError as error:
            return Deferred(delivery, "payload", str(error))
        except MemoryError:
            return Deferred(delivery, "memory", "the worker had no memory to read the job")
        except Exception as error:
            # a fault of ours, met on one job's data: that job pays, the others go on
            log.exception("job.intake_failed", **of_job(delivery.job_id, job.traceparent if job else None))
            message = f"the worker could not read the job: {type(error).__name__}: {error}"
            return Refused(delivery, Failure(code="engine_error", message=message), job)
        return Accepted(delivery, request, job)

    def _payload(self, delivery: Delivery) -> bytes:
        if delivery.payload is not None:
            return delivery.payload
        if not delivery.payload_ref:
            raise InvalidJob("lost_payload", "the job has neither a payload nor a reference to one")
        if self.store is None:
            message = f"the payload is at {delivery.payload_ref} and this worker has no object store: set object_store"
            raise ObjectStoreError(message)
        # one byte more than is allowed tells that it is too large
        return self.store.get_range(delivery.payload_ref, 0, MAX_PAYLOAD_BYTES + 1)

    def _request(self, delivery: Delivery, job: Job) -> Request:
        if job.model is not None and job.model not in self.models:
            known = ", ".join(sorted(self.models))
            raise InvalidJob("unknown_model", f"the job asks for model {job.model!r}; this queue serves {known}")
        if job.result_store == "object" and self.store is None:
            raise InvalidJob("not_supported", "result_store is object and this worker has no object store")
        prompt = fit(self._tokenise(job), job.options, self.max_model_len, self.tokenizer.bos_token_id)
        return Request(
            request_id=delivery.job_id,
            prompt=prompt,
            params=sampling_params(job.options, delivery.seed),
            cache_salt=None if self.shared_tenants else delivery.tenant,
            resumed=self._resumed(delivery, prompt, job),
            priority=LANES.index(job.lane),
            stream=delivery.stream_tokens,
            has_deadline=job.timeout_s is not None,
            timed=self.traced and not is_sampled_out(job.traceparent),
        )

    def _tokenise(self, job: Job) -> TokenIds:
        if isinstance(job.prompt, tuple):
            if not 0 <= min(job.prompt) <= max(job.prompt) < self.tokenizer.vocab_size:
                message = f"prompt: a token id lies outside the vocabulary of {self.tokenizer.vocab_size:,}"
                raise InvalidJob("invalid_job", message)
            return np.asarray(job.prompt, dtype=np.int32)
        if job.prompt is not None:
            return self.tokenizer.encode(job.prompt)
        return self.tokenizer.encode_chat([message.model_dump() for message in job.messages or ()])

    def _resumed(self, delivery: Delivery, prompt: TokenIds, job: Job) -> tuple[Progress, ...]:
        if not delivery.checkpoint:
            return ()
        options, ids = job.options, of_job(delivery.job_id, job.traceparent)
        if delivery.checkpoint_meta != self.checkpoint_meta(prompt, grammar_of(options)):
            log.info("job.checkpoint_ignored", **ids, why="another model or prompt")
            return ()
        try:
            answers = decode(delivery.checkpoint, n=options.n, with_logprobs=options.logprobs is not None)
        except BadCheckpoint as error:
            log.error("job.checkpoint_ignored", **ids, why=str(error))
            return ()
        if options.prompt_logprobs is not None and all(self._has_ended(prompt, answer) for answer in answers):
            # nobody would compute the prompt
            return ()
        return answers

    def _has_ended(self, prompt: TokenIds, answer: Progress) -> bool:
        too_long = len(prompt) + len(answer.token_ids) >= self.max_model_len
        return too_long or answer.finish_reason is not None


def fit(prompt: TokenIds, options: Options, max_model_len: int, bos_token_id: int | None) -> TokenIds:
    """
    Return the prompt, cut where it is too long and the job says at which end.

    A cut leaves room for `max_tokens` of answer, and half of the context to the prompt at least.
    A BOS token in front stays when the left end is cut: models answer badly without it.

    Raises:
        EmptyPrompt: when there is no token.
        PromptTooLong: when no answer token fits and the job does not say what to cut.
    """
    if len(prompt) == 0:
        raise EmptyPrompt("the prompt has no token: give at least one character that the tokenizer knows")
    if len(prompt) < max_model_len:
        return prompt
    if options.truncate == "error":
        raise PromptTooLong(
            f"the prompt has {len(prompt):,} tokens and the model takes {max_model_len - 1:,} and one of answer: "
            "shorten it, or set truncate to left or right"
        )
    room = max_model_len - min(options.max_tokens, max_model_len // 2)
    head = prompt[:1] if bos_token_id is not None and prompt[0] == bos_token_id else prompt[:0]
    if room == 1:
        # BOS alone asks nothing
        head, prompt = prompt[:0], prompt[len(head) :]
    if options.truncate == "right":
        return prompt[:room]
    return np.concatenate([head, prompt[len(prompt) - room + len(head) :]])


def sampling_params(options: Options, seed: int) -> SamplingParams:
    """The engine's parameters for a job's options; `seed` is the queue's, for jobs without their own."""
    return SamplingParams(
        n=options.n,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        seed=seed if options.seed is None else options.seed,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        include_stop_str_in_output=options.include_stop_str_in_output,
        skip_special_tokens=options.skip_special_tokens,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        grammar=grammar_of(options),
    )


def grammar_of(options: Options) -> Grammar | None:
    """What binds a job's answers; None where nothing does."""
    if options.json_schema is not None:
        # in the schema's own order, in which properties are written
        return Grammar("json_schema", json.dumps(with_json_patterns(options.json_schema)))
    if options.regex is not None:
        return Grammar("regex", options.regex)
    if options.choice is not None:
        return Grammar("choice", json.dumps(options.choice))
    return None


@cache
def _grammar_library() -> str:
    try:
        return f"xgrammar-{version('xgrammar')}"
    except PackageNotFoundError:
        return "none"
