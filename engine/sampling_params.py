"""How one request's tokens are chosen, and when they end."""

import math
from dataclasses import dataclass, field
from enum import IntFlag
from functools import cached_property

from engine.errors import InvalidParams
from engine.grammar import Grammar

MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-5


class Feature(IntFlag):
    """What a step's sampling must do beyond picking the largest logit."""

    GREEDY = 0
    RANDOM = 1
    FILTER = 2
    PENALTY = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32
    GRAMMAR = 64


@dataclass(frozen=True)
class SamplingParams:
    """
    Sampling options of one request, with the names that OpenAI and vLLM use.

    Args:
        n: Answers to the same prompt; answer i draws from its own stream of (seed, i).
        max_tokens: Most tokens of an answer, at least 1.
        min_tokens: Ends are masked before that many tokens.
        temperature: 0, or anything under 1e-5, is greedy.
        top_k: Keep the k largest logits; 0 keeps all.
        top_p: Keep the smallest set whose probabilities reach p.
        min_p: Drop what has less than min_p times the largest probability.
        repetition_penalty: Over prompt and answer; 1 is none.
        presence_penalty, frequency_penalty: Over the answer alone; 0 is none.
        logit_bias: Token id to what is added to its logit.
        seed: Names the random draws; needed where temperature is not 0.
        stop: The answer ends before the first of these strings.
        stop_token_ids: The answer ends at any of these ids, which is then its last token.
        ignore_eos: The model's own ends do not count; `stop_token_ids` still do.
        include_stop_str_in_output: Keep the matched stop string in the text.
        skip_special_tokens: Leave special tokens out of the text.
        logprobs: Also give each token's log-probability and that many best others.
        prompt_logprobs: The same for the prompt's tokens; such a prompt skips the prefix cache.
        grammar: What the whole answer follows; it ends where that is complete, and by EOS nowhere else.
    """

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, ok, want in (
            ("n", 1 <= self.n <= 128, "1 to 128"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens ({self.max_tokens})"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "over 0, up to 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "over 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"0 to {MAX_LOGPROBS}",
            ),
            ("stop", all(self.stop), "strings that are not empty"),
        ):
            if not ok:
                raise InvalidParams(f"{name} is {getattr(self, name)!r}; want {want}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @cached_property
    def features(self) -> Feature:
        """The work that a step with this request has, computed once."""
        features = Feature.GREEDY
        if not self.greedy:
            features |= Feature.RANDOM
            if self.top_k or self.top_p < 1 or self.min_p > 0:
                features |= Feature.FILTER
        if self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty:
            features |= Feature.PENALTY
        if self.logit_bias:
            features |= Feature.BIAS
        if self.min_tokens:
            features |= Feature.MIN_TOKENS
        if self.logprobs is not None:
            features |= Feature.LOGPROBS
        if self.grammar is not None:
            features |= Feature.GRAMMAR
        return features
