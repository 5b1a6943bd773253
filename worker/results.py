"""From what the engine gave to the result on the wire."""

from collections.abc import Sequence

from engine import request as engine_types
from engine.request import FinishReason, RequestOutput
from pagemill.messages import Delivery
from pagemill.schema import Completion, Failure, Result, ResultStatus, TokenLogprob, Usage
from pagemill.versions import SCHEMA_VERSION, code_for
from worker.engine_port import Tokenizer


class ResultMaker:
    """
    Builds results in this worker's name.

    Args:
        model: The name that results carry.
        worker_id: The same, for whoever looks for the log.
    """

    def __init__(self, *, tokenizer: Tokenizer, model: str, worker_id: str) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._worker_id = worker_id

    def make(
        self,
        delivery: Delivery,
        metadata: dict[str, str],
        status: ResultStatus,
        output: RequestOutput | None = None,
        failure: Failure | None = None,
    ) -> Result:
        """
        The result of a job; `output` is what the engine gave, partial where it was stopped.

        An answer that ended in an error makes the whole job failed, without text.
        """
        completions = output.completions if output else ()
        if errors := errors_in(output) if output else []:
            status, failure, completions = "failed", Failure(code="engine_error", message="; ".join(errors)), ()
        version = max(1, min(delivery.version, SCHEMA_VERSION))
        if failure is not None:
            failure = failure.model_copy(update={"code": code_for(version, failure.code)})
        return Result(
            version=version,
            job_id=delivery.job_id,
            status=status,
            completions=tuple(map(self._completion, completions)),
            prompt_logprobs=self._prompt_logprobs(output.prompt_logprobs) if output else None,
            usage=_usage(output) if output else Usage(),
            failure=failure,
            model=self._model,
            worker=self._worker_id,
            attempt=delivery.attempt,
            accepted_ms=delivery.accepted_ms,
            started_ms=delivery.started_ms,
            metadata=metadata,
        )

    def _completion(self, completion: engine_types.Completion) -> Completion:
        return Completion(
            index=completion.index,
            text=completion.text,
            finish_reason=completion.finish_reason.value,
            token_ids=completion.token_ids,
            logprobs=None if completion.logprobs is None else tuple(map(self._logprob, completion.logprobs)),
        )

    def _prompt_logprobs(
        self, logprobs: Sequence[engine_types.TokenLogprob | None] | None
    ) -> tuple[TokenLogprob | None, ...] | None:
        if logprobs is None:
            return None
        return tuple(None if one is None else self._logprob(one) for one in logprobs)

    def _logprob(self, one: engine_types.TokenLogprob) -> TokenLogprob:
        text = self._tokenizer.token_text
        return TokenLogprob(
            token_id=one.token_id,
            token=text(one.token_id),
            logprob=one.logprob,
            top=tuple((token_id, text(token_id), logprob) for token_id, logprob in one.top),
        )


def errors_in(output: RequestOutput) -> list[str]:
    """What went wrong with answers that are none."""
    return [one.error or "no details" for one in output.completions if one.finish_reason is FinishReason.ERROR]


def _usage(output: RequestOutput) -> Usage:
    return Usage(
        prompt_tokens=output.num_prompt_tokens,
        completion_tokens=sum(len(one.token_ids) for one in output.completions),
        cached_tokens=output.num_cached_tokens,
        gpu_ms=output.gpu_ms,
    )
