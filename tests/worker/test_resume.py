"""
Taken up from its checkpoint at any token, a job gives what it gives undisturbed: state by state.

One engine runs a request to its end and is asked for its progress after every step; another one
of the same tiny float32 model continues each of these checkpoints. All that it is given of the
first are the bytes that a worker saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.load import load_engine
from engine.request import FinishReason, Request, RequestOutput, TokenLogprob
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.support.tiny_models import save_tiny_writer
from worker.checkpoints import Saved, decode

NUM_TOKENS = 20


@dataclass(frozen=True)
class Run:
    """An undisturbed run: what it gave, and the checkpoint after each of its steps."""

    request: Request
    output: RequestOutput
    checkpoints: list[bytes]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.output.completions[0].token_ids

    @property
    def text(self) -> str:
        return self.output.completions[0].text


@dataclass(frozen=True)
class Workplace:
    """Two engines of one model, as two workers have them."""

    first: LLMEngine
    second: LLMEngine
    tokenizer: Tokenizer

    def run(self, *, stream: bool = False, **params: Any) -> Run:
        """Run a request undisturbed: seeded draws, unless `params` say otherwise."""
        usual = {"max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 7, "ignore_eos": True}
        prompt = self.tokenizer.encode("The quick brown fox")
        request = Request("undisturbed", prompt, SamplingParams(**usual | params), stream=stream)
        saved = Saved([0] * request.params.n)
        self.first.add(request)
        checkpoints = []
        while not (finished := self.first.step().finished):
            saved.add(self.first.progress({"undisturbed": saved.num_tokens})["undisturbed"])
            checkpoints.append(saved.unsaved)
        return Run(request, finished[0], checkpoints)

    def check_resumed(self, run: Run) -> None:
        """Continue each checkpoint on the second engine, side by side: all end alike, and only the rest is computed."""
        params, missing = run.request.params, 0
        for step, saved in enumerate(run.checkpoints):
            answers = decode(saved, n=params.n, with_logprobs=params.logprobs is not None)
            self.second.add(replace(run.request, request_id=str(step), resumed=answers))
            for answer, whole in zip(answers, run.output.completions, strict=True):
                missing += len(whole.token_ids) - len(answer.token_ids)
        before, outputs = self.second.stats().generated_tokens, {}
        texts = dict.fromkeys(range(len(run.checkpoints)), "")
        while self.second.has_work:
            stepped = self.second.step()
            outputs |= {int(output.request_id): output for output in stepped.finished}
            for delta in stepped.deltas:
                texts[int(delta.request_id)] += delta.text

        assert outputs.keys() == texts.keys()
        for step, output in outputs.items():
            assert_same(run.output, output)
            assert texts[step] == (run.text if run.request.stream else "")
        assert missing == self.second.stats().generated_tokens - before


def assert_same(expected: RequestOutput, actual: RequestOutput) -> None:
    for want, got in zip(expected.completions, actual.completions, strict=True):
        assert (want.token_ids, want.text, want.finish_reason) == (got.token_ids, got.text, got.finish_reason)
        assert rounded(want.logprobs) == rounded(got.logprobs)
    assert rounded(expected.prompt_logprobs) == rounded(actual.prompt_logprobs)


def rounded(logprobs: Sequence[TokenLogprob | None] | None) -> list[Any]:
    # one chunk of many tokens gives other last bits than one token at a time
    if logprobs is None:
        return []
    return [
        one
        and (
            one.token_id,
            pytest.approx(one.logprob, abs=1e-4),
            [(token_id, pytest.approx(logprob, abs=1e-4)) for token_id, logprob in one.top],
        )
        for one in logprobs
    ]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_writer(folder)
    config = EngineConfig(model=folder, device="cpu", dtype="float32", max_model_len=128, num_threads=1)
    return Workplace(load_engine(config), load_engine(config), Tokenizer(folder))


def test_draws_go_on(workplace: Workplace) -> None:
    """
    Each token is drawn by its place in the answer, wherever it is drawn.
    """
    run = workplace.run()

    assert NUM_TOKENS - 1 == len(run.checkpoints)
    assert run.tokens != workplace.run(seed=8).tokens
    workplace.check_resumed(run)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5}]
)
def test_penalties_count_what_was_generated_before(workplace: Workplace, penalty: dict[str, float]) -> None:
    """
    Tokens of the checkpoint weigh as tokens of the answer, and the prompt's as the prompt's.
    """
    run = workplace.run(temperature=0.0, max_tokens=30, **penalty)

    assert run.tokens != workplace.run(temperature=0.0, max_tokens=30).tokens
    workplace.check_resumed(run)


def test_a_bias_stays(workplace: Workplace) -> None:
    """
    What the options do to single tokens they do on both sides.
    """
    run = workplace.run(logit_bias={90: 9.0, 91: 9.0})

    assert {90, 91} & set(run.tokens)
    workplace.check_resumed(run)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_across_the_seam(workplace: Workplace, include: bool) -> None:
    """
    Its beginning may be among the saved tokens: the answer ends where it would have, and is cut there.
    """
    letters = dict.fromkeys(workplace.tokenizer.encode("abcdefgh").tolist(), 30.0)
    text = workplace.run(logit_bias=letters).text
    stop = next(text[end - 6 : end] for end in range(14, len(text)) if text.find(text[end - 6 : end]) == end - 6)
    run = workplace.run(logit_bias=letters, stop=(stop,), include_stop_str_in_output=include)

    assert FinishReason.STOP is run.output.completions[0].finish_reason
    assert text[: text.find(stop)] + (stop if include else "") == run.text
    assert len(run.checkpoints) >= 6
    workplace.check_resumed(run)


def test_min_tokens_are_counted_over_the_seam(workplace: Workplace) -> None:
    """
    Ends are masked until the whole answer has min_tokens, not until the resumed part has.
    """
    free = workplace.run()
    ends = tuple(sorted(set(free.tokens)))
    run = workplace.run(min_tokens=15, stop_token_ids=ends)

    assert 1 == len(workplace.run(stop_token_ids=ends).tokens)
    assert 16 <= len(run.tokens) < NUM_TOKENS
    workplace.check_resumed(run)


def test_stop_strings_wait_for_min_tokens(workplace: Workplace) -> None:
    """
    A stop string within min_tokens ends nothing, whichever side of the seam it lies on.
    """
    letters = dict.fromkeys(workplace.tokenizer.encode("abcdefgh").tolist(), 30.0)
    text = workplace.run(logit_bias=letters).text
    run = workplace.run(logit_bias=letters, stop=tuple(sorted(set(text))), min_tokens=10)

    assert 10 == len(run.tokens)
    workplace.check_resumed(run)


def byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text's single bytes."""
    letters = "".join(piece for piece, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text))
    names = {tokenizer._backend.id_to_token(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [names[letter] for letter in letters]


@pytest.mark.parametrize("stream", [False, True])
def test_characters_are_joined_across_the_seam(workplace: Workplace, stream: bool) -> None:
    """
    A character whose bytes are tokens on both sides reads as one, in the text and in what is streamed.
    """
    tokens = byte_tokens(workplace.tokenizer, "éè")
    run = workplace.run(logit_bias=dict.fromkeys(tokens, 30.0), stream=stream)

    assert {"è", "\ufffd"} <= set(run.text)
    workplace.check_resumed(run)


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_of_saved_tokens_come_out_again(workplace: Workplace, num_top: int) -> None:
    """
    The result has one log-probability a token, with the best beside it, as if it had been computed here.
    """
    run = workplace.run(logprobs=num_top)

    assert [num_top] * NUM_TOKENS == [len(one.top) for one in run.output.completions[0].logprobs or ()]
    workplace.check_resumed(run)


def test_logprobs_of_the_prompt_are_computed_again(workplace: Workplace) -> None:
    """
    They are not saved: the prompt is computed with the saved tokens behind it, and gives the same.
    """
    run = workplace.run(prompt_logprobs=2, logprobs=1)

    assert len(run.request.prompt) == len(run.output.prompt_logprobs or ())
    workplace.check_resumed(run)


def ending_apart(workplace: Workplace, place: int, **params: Any) -> Run:
    """Three answers, one of which ends early."""
    free = workplace.run(n=3, **params).output.completions
    others = {token for answer in free if answer.index != place for token in answer.token_ids}
    end = next(token for token in free[place].token_ids[3:10] if token not in others)
    return workplace.run(n=3, stop_token_ids=(end,), **params)


@pytest.mark.parametrize("place", [0, 1])
def test_every_answer_of_several_goes_on(workplace: Workplace, place: int) -> None:
    """
    Each from its own tokens with its own draws; one that had ended keeps its end and is not computed again.
    """
    run = ending_apart(workplace, place, logprobs=1)
    ended = [answer.index for answer in run.output.completions if answer.finish_reason is FinishReason.STOP]
    last = decode(run.checkpoints[-1], n=3, with_logprobs=True)

    assert [place] == ended
    assert FinishReason.STOP is last[place].finish_reason
    assert 3 == len({answer.token_ids for answer in run.output.completions})
    workplace.check_resumed(run)


def test_logprobs_of_the_prompt_do_not_need_the_first_answer(workplace: Workplace) -> None:
    """
    Where the first answer had ended, the next one computes the prompt for all.
    """
    run = ending_apart(workplace, 0, prompt_logprobs=1)

    assert FinishReason.STOP is decode(run.checkpoints[-1], n=3, with_logprobs=False)[0].finish_reason
    workplace.check_resumed(run)


def test_an_end_that_the_tokens_do_not_show_is_kept(workplace: Workplace) -> None:
    """
    An answer that the first engine ended for its own limits has ended.
    """
    run = workplace.run(n=2, max_tokens=6)
    whole, going = decode(run.checkpoints[-1], n=2, with_logprobs=False)
    cut = replace(whole, token_ids=whole.token_ids[:3], finish_reason=FinishReason.LENGTH)
    workplace.second.add(replace(run.request, resumed=(cut, going)))
    while not (finished := workplace.second.step().finished):
        pass

    answers = finished[0].completions
    assert [(cut.token_ids, FinishReason.LENGTH), (run.output.completions[1].token_ids, FinishReason.LENGTH)] == [
        (answer.token_ids, answer.finish_reason) for answer in answers
    ]
