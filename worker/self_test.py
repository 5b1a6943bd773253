"""A few tokens before the first job: a worker that cannot compute must not take any."""

from engine.errors import EngineError, StartupError
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from worker.engine_port import Engine, Tokenizer

PROMPT = "The sky is blue because"
NUM_TOKENS = 4
# far more than that takes in pieces of any size
MAX_STEPS = 1000


class SelfTestFailed(StartupError):
    """Raised when the engine does not answer its own question well."""


def self_test(engine: Engine, tokenizer: Tokenizer) -> None:
    """
    Have the engine answer a fixed prompt twice, by the way that jobs take.

    Raises:
        SelfTestFailed: it failed, its logits are not finite, or it gave two different answers.
    """
    first, second = (_answer(engine, tokenizer, f"self-test-{number}") for number in (1, 2))
    if first != second:
        raise SelfTestFailed(
            f"the engine answered one prompt with the tokens {first} and then with {second}: "
            "the device, or what computes on it, is faulty"
        )


def _answer(engine: Engine, tokenizer: Tokenizer, name: str) -> tuple[int, ...]:
    prompt = tokenizer.encode(PROMPT)[: engine.max_model_len - 1]
    engine.add(Request(name, prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)))
    for _ in range(MAX_STEPS):
        try:
            finished = engine.step().finished
        except (EngineError, RuntimeError) as error:
            raise SelfTestFailed(f"the engine cannot compute a few tokens: {type(error).__name__}: {error}") from error
        if finished:
            completion = finished[0].completions[0]
            if completion.finish_reason is FinishReason.ERROR:
                raise SelfTestFailed(
                    "the model's logits are not finite: its weights are damaged, or --dtype does not suit them"
                )
            return completion.token_ids
    raise SelfTestFailed(f"the engine gave no answer of {NUM_TOKENS} tokens in {MAX_STEPS} steps")
