"""The engine's door: what goes in, what comes out, and when answers end."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.block_manager import BlockManager
from engine.errors import EmptyPrompt, InvalidParams, PromptTooLong
from engine.llm_engine import LLMEngine
from engine.output import OutputProcessor
from engine.request import FinishReason, Progress, Request, RequestOutput, TextDelta
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from tests.support.fake_runner import FakeRunner, answer_token
from tests.support.tiny_tokenizers import byte_level, save

VOCAB = 1000
EOS = 1
MAX_MODEL_LEN = 64


def make_engine(
    *,
    depth: int = 1,
    tokenizer: Tokenizer | None = None,
    token_of: Callable[[str, int, int], int] = answer_token,
    bad: frozenset[tuple[str, int, int]] = frozenset(),
    num_blocks: int = 33,
) -> LLMEngine:
    blocks = BlockManager(num_blocks=num_blocks, block_size=4)
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=MAX_MODEL_LEN)
    return LLMEngine(
        scheduler=scheduler,
        runner=FakeRunner(num_blocks=num_blocks, block_size=4, bad_positions=bad, token_of=token_of),
        outputs=OutputProcessor(tokenizer, {EOS}, MAX_MODEL_LEN),
        tokenizer=tokenizer,
        vocab_size=VOCAB,
        model_name="fake",
        fingerprint="fake",
        depth=depth,
    )


def request(name: str, prompt: list[int], **params: object) -> Request:
    extra = {key: params.pop(key) for key in ("resumed", "stream") if key in params}
    return Request(name, np.array(prompt, dtype=np.int32), SamplingParams(**params), **extra)  # type: ignore[arg-type]


def run(engine: LLMEngine) -> tuple[dict[str, RequestOutput], list[TextDelta]]:
    finished: dict[str, RequestOutput] = {}
    deltas: list[TextDelta] = []
    while engine.has_work:
        outputs = engine.step()
        finished |= {output.request_id: output for output in outputs.finished}
        deltas += outputs.deltas
    return finished, deltas


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(save(byte_level(), tmp_path))


def spell(tokenizer: Tokenizer, prompt_length: int, text: str, *ends: int) -> Callable[[str, int, int], int]:
    """A model that writes a text, then the given tokens, then the last of them for ever."""
    tokens = [*tokenizer.encode(text).tolist(), *ends] or [0]
    return lambda _request, _index, position: tokens[min(position - prompt_length, len(tokens) - 1)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_request_gets_its_own_tokens(depth: int) -> None:
    """
    However many steps are in flight, an answer is the model's tokens at its positions.
    """
    engine = make_engine(depth=depth)
    for name, length in (("a", 3), ("b", 9), ("c", 20), ("d", 1), ("e", 7)):
        engine.add(request(name, list(range(10, 10 + length)), max_tokens=12))

    finished, _ = run(engine)

    for name, length in (("a", 3), ("b", 9), ("c", 20), ("d", 1), ("e", 7)):
        expected = tuple(answer_token(name, 0, length + i) for i in range(12))
        assert expected == finished[name].completions[0].token_ids
        assert FinishReason.LENGTH == finished[name].completions[0].finish_reason
    assert 60 == engine.stats().generated_tokens


def test_eos_ends_an_answer_and_is_its_last_token(tokenizer: Tokenizer) -> None:
    """
    The model's own end is the last token id, and not part of the text.
    """
    engine = make_engine(tokenizer=tokenizer, token_of=spell(tokenizer, 1, "Numbers like 1", EOS))
    engine.add(request("a", [5], max_tokens=40))

    completion = run(engine)[0]["a"].completions[0]

    assert "Numbers like 1" == completion.text
    assert EOS == completion.token_ids[-1]
    assert FinishReason.STOP == completion.finish_reason


def test_ignore_eos_runs_to_the_length(tokenizer: Tokenizer) -> None:
    """
    With ignore_eos only max_tokens ends the answer.
    """
    engine = make_engine(tokenizer=tokenizer, token_of=lambda *_: EOS)
    engine.add(request("a", [5], max_tokens=7, ignore_eos=True))

    completion = run(engine)[0]["a"].completions[0]

    assert (EOS,) * 7 == completion.token_ids
    assert FinishReason.LENGTH == completion.finish_reason


def test_a_stop_token_id_ends_even_where_eos_is_ignored(tokenizer: Tokenizer) -> None:
    """
    A user's own stop ids count whatever ignore_eos says.
    """
    engine = make_engine(tokenizer=tokenizer, token_of=spell(tokenizer, 1, "dog", EOS, 77))
    engine.add(request("a", [5], max_tokens=40, ignore_eos=True, stop_token_ids=(77,)))

    completion = run(engine)[0]["a"].completions[0]

    assert "dog" == completion.text
    assert (EOS, 77) == completion.token_ids[-2:]


@pytest.mark.parametrize(("include", "expected"), [(False, "the quick "), (True, "the quick bro")])
def test_a_stop_string_cuts_the_text(tokenizer: Tokenizer, include: bool, expected: str) -> None:
    """
    The answer ends at the first stop string, which is cut off unless it is asked for.
    """
    engine = make_engine(tokenizer=tokenizer, token_of=spell(tokenizer, 1, "the quick brown fox", EOS))
    engine.add(request("a", [5], max_tokens=40, stop=("fox", "bro"), include_stop_str_in_output=include))

    completion = run(engine)[0]["a"].completions[0]

    assert expected == completion.text
    assert FinishReason.STOP == completion.finish_reason


def test_streamed_text_adds_up_to_the_answer(tokenizer: Tokenizer) -> None:
    """
    The deltas of a streaming request join to its final text, and never show a part of a stop string.
    """
    text = "Größe, 東京 and 🙂👍🏽 END and more"
    engine = make_engine(tokenizer=tokenizer, token_of=spell(tokenizer, 1, text, EOS))
    engine.add(request("a", [5], max_tokens=60, stop=("END",), stream=True))
    engine.add(request("b", [5], max_tokens=60, stop=("END",)))

    finished, deltas = run(engine)

    assert "Größe, 東京 and 🙂👍🏽 " == finished["a"].completions[0].text
    assert finished["a"].completions[0].text == "".join(delta.text for delta in deltas)
    assert {"a"} == {delta.request_id for delta in deltas}


def test_a_resumed_answer_goes_on_where_it_was(tokenizer: Tokenizer) -> None:
    """
    Tokens that another engine generated come first, are not computed again as output, and stop strings span the seam.
    """
    text = "the quick brown fox jumps"
    tokens = tokenizer.encode(text).tolist()
    engine = make_engine(tokenizer=tokenizer, token_of=spell(tokenizer, 1, text, EOS))
    whole = request("whole", [5], max_tokens=40, stop=("fox j",))
    engine.add(whole)
    engine.add(request("resumed", [5], max_tokens=40, stop=("fox j",), resumed=(Progress(tuple(tokens[:-3])),)))

    finished, _ = run(engine)

    assert finished["whole"].completions[0].text == finished["resumed"].completions[0].text
    assert finished["whole"].completions[0].token_ids == finished["resumed"].completions[0].token_ids


def test_an_answer_that_was_complete_is_not_run_again(tokenizer: Tokenizer) -> None:
    """
    A checkpoint taken after the last token gives the finished answer at once.
    """
    engine = make_engine(tokenizer=tokenizer)
    tokens = (*tokenizer.encode("dog").tolist(), EOS)
    engine.add(request("a", [5], max_tokens=40, resumed=(Progress(tokens),)))

    outputs = engine.step()

    assert "dog" == outputs.finished[0].completions[0].text
    assert 0 == engine.stats().num_steps
    assert not engine.has_work


def test_n_answers_come_together_by_index() -> None:
    """
    A request with n answers ends once, with all of them in order.
    """
    engine = make_engine()
    engine.add(request("a", [3, 4, 5], max_tokens=5, n=3))

    finished, _ = run(engine)

    expected = [tuple(answer_token("a", index, 3 + i) for i in range(5)) for index in range(3)]
    assert expected == [completion.token_ids for completion in finished["a"].completions]


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_gives_what_there_is(depth: int) -> None:
    """
    An aborted request ends at once with the tokens it has, and frees what it held.
    """
    engine = make_engine(depth=depth)
    engine.add(request("a", [3, 4], max_tokens=50))
    engine.add(request("b", [3, 9], max_tokens=5))
    for _ in range(8):
        engine.step()

    output = engine.abort("a")

    assert output is not None
    completion = output.completions[0]
    assert FinishReason.ABORT == completion.finish_reason
    assert tuple(answer_token("a", 0, 2 + i) for i in range(len(completion.token_ids))) == completion.token_ids
    assert len(completion.token_ids) >= 5
    run(engine)
    assert 0 == engine.stats().kv_usage
    assert engine.abort("a") is None


def test_logits_that_are_not_finite_end_one_answer() -> None:
    """
    A row without finite logits ends with an error that says so; its neighbours go on.
    """
    engine = make_engine(bad=frozenset({("a", 0, 6)}))
    engine.add(request("a", [3, 4], max_tokens=20))
    engine.add(request("b", [3, 9], max_tokens=20))

    finished, _ = run(engine)

    assert FinishReason.ERROR == finished["a"].completions[0].finish_reason
    assert "not finite" in str(finished["a"].completions[0].error)
    assert 20 == len(finished["b"].completions[0].token_ids)


@pytest.mark.parametrize(("length", "num_output"), [(MAX_MODEL_LEN - 2, 2), (MAX_MODEL_LEN - 1, 1)])
def test_the_longest_prompts_end_at_the_models_length(length: int, num_output: int) -> None:
    """
    Prompt and answer together never pass max_model_len.
    """
    engine = make_engine()
    engine.add(request("a", [7] * length, max_tokens=9))

    completion = run(engine)[0]["a"].completions[0]

    assert num_output == len(completion.token_ids)
    assert FinishReason.LENGTH == completion.finish_reason


def test_what_cannot_be_served_is_refused_at_the_door() -> None:
    """
    Bad requests raise typed errors with the values, and the engine stays as it was.
    """
    engine = make_engine()
    engine.add(request("a", [1], max_tokens=2))

    with pytest.raises(EmptyPrompt):
        engine.add(request("b", []))
    with pytest.raises(PromptTooLong, match=r"has 64 tokens .* takes 64"):
        engine.add(request("b", [7] * MAX_MODEL_LEN))
    with pytest.raises(InvalidParams, match="token id 1000 is not in the vocabulary of 1,000"):
        engine.add(request("b", [VOCAB]))
    with pytest.raises(InvalidParams, match="'a' is in use"):
        engine.add(request("a", [1]))

    assert ["a"] == list(run(engine)[0])


def test_progress_shows_the_tokens_so_far() -> None:
    """
    Checkpoints see every known token of each answer, and nothing of requests that are gone.
    """
    engine = make_engine()
    engine.add(request("a", [3, 4], max_tokens=50, n=2))
    assert 0 == engine.num_started("a")
    for _ in range(6):
        engine.step()

    progress = engine.progress({"a": (0, 2), "gone": (0,)})

    assert ["a"] == list(progress)
    for index, (known, answer) in enumerate(zip((0, 2), progress["a"], strict=True)):
        places = range(2 + known, 2 + known + len(answer.token_ids))
        assert tuple(answer_token("a", index, place) for place in places) == answer.token_ids
        assert answer.token_ids
    assert 2 == engine.num_started("a")


def test_a_reset_cache_finds_nothing() -> None:
    """
    After a reset the same prompt is computed again, and the answer is the same.
    """
    engine = make_engine()
    prompt = np.arange(10, 30, dtype=np.int32)
    first = engine.generate([prompt], SamplingParams(max_tokens=3))[0]
    warm = engine.generate([prompt], SamplingParams(max_tokens=3))[0]

    engine.reset_prefix_cache()
    cold = engine.generate([prompt], SamplingParams(max_tokens=3))[0]

    assert (0, 16, 0) == (first.num_cached_tokens, warm.num_cached_tokens, cold.num_cached_tokens)
    assert first.completions == warm.completions == cold.completions


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_many_answers_end_each_in_its_own_way(depth: int) -> None:
    """
    Ends by value and by length in the same steps, with tokens of ended answers still in flight and slots in use again.
    """

    def token_of(name: str, _index: int, position: int) -> int:
        return EOS if position == 3 + int(name) % 7 else 100 + position

    engine = make_engine(depth=depth, token_of=token_of)
    for number in range(24):
        ends: dict[str, object] = [{}, {"ignore_eos": True}, {"stop_token_ids": (106,)}][number % 3]
        engine.add(request(str(number), [4, 5, number], max_tokens=5, **ends))

    finished, _ = run(engine)

    for number in range(24):
        tokens = [token_of(str(number), 0, 3 + i) for i in range(5)]
        stops = [{EOS}, set(), {EOS, 106}][number % 3]
        length = next((place + 1 for place, token in enumerate(tokens) if token in stops), None)
        completion = finished[str(number)].completions[0]
        assert tuple(tokens[:length]) == completion.token_ids
        assert (FinishReason.LENGTH if length is None else FinishReason.STOP) == completion.finish_reason
    assert sum(len(output.completions[0].token_ids) for output in finished.values()) == engine.stats().generated_tokens


def test_a_request_too_large_for_the_cache_is_ended_when_it_is_added() -> None:
    """
    An abort before the next step finds it gone, and the step reports it.
    """
    engine = make_engine(num_blocks=3)
    engine.add(request("a", list(range(20)), max_tokens=3))

    assert engine.abort("a") is None
    finished, _ = run(engine)

    assert FinishReason.LENGTH is finished["a"].completions[0].finish_reason


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [65, 17])
def test_each_request_starts_once_and_gets_a_first_token_once(depth: int, num_blocks: int) -> None:
    """
    With several answers, and with so few blocks that requests are preempted and computed again, too.
    """
    engine = make_engine(depth=depth, num_blocks=num_blocks)
    engine.add(request("many", [1, 2, 3], n=3, max_tokens=9, ignore_eos=True))
    for number in range(3):
        engine.add(request(f"long-{number}", [number, *range(2, 9)], max_tokens=40, ignore_eos=True))
    engine.add(request("one token", [5], max_tokens=1))
    started: list[str] = []
    answered: list[str] = []
    while engine.has_work:
        outputs = engine.step()
        started += outputs.started
        answered += outputs.answered
        assert set(answered) <= set(started)

    assert ["long-0", "long-1", "long-2", "many", "one token"] == sorted(started) == sorted(answered)
    assert (num_blocks == 17) == (engine.stats().num_preemptions > 0)


def test_an_aborted_request_gets_no_first_token_under_its_old_name() -> None:
    """
    What a step in flight gives for an aborted request is not another's of the same name.
    """
    engine = make_engine(depth=2)
    engine.add(request("a", [1, 2, 3], max_tokens=5, ignore_eos=True))
    assert (("a",), ()) == ((turn := engine.step()).started, turn.answered)
    engine.abort("a")
    engine.add(request("a", [7, 8, 9, 10], max_tokens=5, ignore_eos=True))

    turns = [engine.step() for _ in range(3)]

    assert [("a",), (), ()] == [turn.started for turn in turns]
    assert 1 == sum(len(turn.answered) for turn in turns)
    # not in the turn that takes in the step of the first one
    assert () == turns[0].answered
