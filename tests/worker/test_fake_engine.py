"""The engine without a model: the same manners as the real one."""

import numpy as np
import pytest
import tokenizers

from engine.capacity import Freeable
from engine.errors import EmptyPrompt, PromptTooLong
from engine.request import FinishReason, Progress, Request, RequestOutput
from engine.sampling_params import SamplingParams
from worker.fake_engine import ByteTokenizer, FakeEngine


def request(
    name: str, text: str = "hello", resumed: tuple[Progress, ...] = (), priority: int = 0, **params: int
) -> Request:
    options = {"max_tokens": 12, **params}
    return Request(name, ByteTokenizer().encode(text), SamplingParams(**options), resumed=resumed, priority=priority)


def run(engine: FakeEngine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_work:
        outputs.update({output.request_id: output for output in engine.step().finished})
    return outputs


def num_generated(engine: FakeEngine, *names: str) -> dict[str, int]:
    """Tokens that each of these requests has, of one answer each."""
    return {name: len(answer.token_ids) for name, (answer,) in engine.progress(dict.fromkeys(names, (0,))).items()}


def test_the_text_depends_on_prompt_and_seed_alone() -> None:
    """
    A prompt gets the same letters alone, in a batch, fast or slow; another seed gets others.
    """
    alone, batch = FakeEngine(), FakeEngine(tokens_per_s=1e6, sleep=lambda _: None)
    alone.add(request("a"))
    for name in "abc":
        batch.add(request(name, seed=0 if name == "a" else ord(name)))
    batched = run(batch)

    assert run(alone)["a"].completions == batched["a"].completions
    assert batched["a"].completions[0].text != batched["b"].completions[0].text
    assert 12 == len(batched["a"].completions[0].token_ids)


def test_resumed_tokens_are_continued() -> None:
    """
    A request that brings tokens ends with these in front, and computes only the rest.
    """
    whole, resumed = FakeEngine(), FakeEngine()
    whole.add(request("a"))
    text = run(whole)["a"].completions[0].text
    resumed.add(request("a", resumed=(Progress(tuple(text[:5].encode())),)))

    assert text == run(resumed)["a"].completions[0].text
    assert 7 == resumed.stats().generated_tokens


def test_several_answers_differ() -> None:
    """
    The answers of one request have texts of their own, by index.
    """
    engine = FakeEngine()
    engine.add(request("a", n=3))
    completions = run(engine)["a"].completions

    assert [0, 1, 2] == [one.index for one in completions]
    assert 3 == len({one.text for one in completions})


def test_only_what_fits_runs() -> None:
    """
    Requests wait in order while places or tokens are out, and capacity says so.
    """
    engine = FakeEngine(max_num_seqs=2, kv_tokens=1_000, tokens_per_s=1.0, sleep=lambda _: None)
    for name in "abc":
        engine.add(request(name))
    engine.step()
    capacity = engine.capacity()

    assert (0, 1) == (capacity.free_seqs, capacity.waiting_seqs)
    assert 1_000 - 3 * 5 - 2 * 12 == capacity.free_tokens
    assert (2, 0) == (engine.num_started("a") + engine.num_started("b"), engine.num_started("c"))


def test_abort_keeps_the_partial_text() -> None:
    """
    An aborted request gives what it had and leaves the engine empty.
    """
    engine = FakeEngine(tokens_per_s=1.0, sleep=lambda _: None)
    engine.add(request("a"))
    for _ in range(4):
        engine.step()
    progress = engine.progress({"a": (1,), "not here": (0,)})
    output = engine.abort("a")

    assert output is not None
    assert FinishReason.ABORT is output.completions[0].finish_reason
    assert [Progress(output.completions[0].token_ids[1:])] == progress["a"]
    assert 4 == len(output.completions[0].text)
    assert not engine.has_work
    assert engine.abort("a") is None


def test_deltas_add_up_to_the_text() -> None:
    """
    A streaming request's deltas, end to end, are its text.
    """
    engine = FakeEngine(tokens_per_s=1.0, sleep=lambda _: None)
    engine.add(Request("a", ByteTokenizer().encode("hello"), SamplingParams(max_tokens=6), stream=True))
    text, finished = "", ()
    while engine.has_work:
        outputs = engine.step()
        text += "".join(delta.text for delta in outputs.deltas)
        finished += outputs.finished

    assert finished[0].completions[0].text == text


def test_the_pace_is_kept() -> None:
    """
    Steps wait as long as their tokens take at the set speed.
    """
    waits: list[float] = []
    engine = FakeEngine(tokens_per_s=2_000, sleep=waits.append)
    for name in "abcd":
        engine.add(request(name, max_tokens=50))
    run(engine)

    assert sum(waits) == pytest.approx(4 * 50 / 2_000)
    assert max(waits) <= 0.01


def test_prompts_are_checked_as_the_real_engine_does() -> None:
    """
    Empty and over-long prompts raise the engine's own errors.
    """
    engine = FakeEngine(max_model_len=8)

    with pytest.raises(EmptyPrompt):
        engine.add(Request("a", np.zeros(0, np.int32), SamplingParams()))
    with pytest.raises(PromptTooLong):
        engine.add(request("a", "12345678"))
    engine.add(request("a", "1234567"))
    assert 1 == len(run(engine)["a"].completions[0].token_ids)


def test_the_stream_of_a_resumed_request_begins_at_its_beginning() -> None:
    """
    Deltas join to the whole text, so that a reader can tell by offsets what it has seen.
    """
    engine = FakeEngine()
    start = request("a", resumed=(Progress(tuple(b"abc")),))
    engine.add(Request("a", start.prompt, start.params, resumed=start.resumed, stream=True))
    outputs = engine.step()

    assert outputs.finished[0].completions[0].text == "".join(delta.text for delta in outputs.deltas)


def test_urgent_work_preempts_in_the_next_step() -> None:
    """
    A more urgent request takes the place of the youngest of the least urgent, which goes on later where it was.
    """
    engine = FakeEngine(max_num_seqs=2, tokens_per_s=1.0, sleep=lambda _: None)
    for name, priority in (("standard", 1), ("bulk", 2), ("more bulk", 2)):
        engine.add(request(name, priority=priority))
    engine.step()
    engine.add(request("urgent", priority=0, max_tokens=2))
    engine.step()
    done = num_generated(engine, "standard", "bulk", "urgent")
    outputs = run(engine)

    assert {"standard": 2, "bulk": 1, "urgent": 1} == done
    assert {"standard": 0, "bulk": 0, "more bulk": 0, "urgent": 0} | {"bulk": 1} == {
        name: output.num_preemptions for name, output in outputs.items()
    }
    assert 12 + 12 + 12 + 2 == engine.stats().generated_tokens
    assert 4 * 5 == engine.stats().prompt_tokens


def test_nobody_is_preempted_in_vain() -> None:
    """
    Where all less urgent work together does not make room, it goes on.
    """
    engine = FakeEngine(max_num_seqs=2, tokens_per_s=1.0, sleep=lambda _: None)
    engine.add(request("a", priority=0))
    engine.add(request("b", priority=2))
    engine.step()
    engine.add(request("c", priority=1, n=2))
    engine.step()

    assert {"a": 2, "b": 2} == num_generated(engine, "a", "b")


def test_capacity_says_what_preemption_would_free() -> None:
    """
    Each priority is told what less urgent work holds and was promised, and how much of it waits.
    """
    engine = FakeEngine(max_num_seqs=2, kv_tokens=30, tokens_per_s=1.0, sleep=lambda _: None)
    for name, priority in (("standard", 1), ("bulk", 2)):
        engine.add(request(name, priority=priority, max_tokens=5))
    engine.step()
    engine.add(request("waits", "twelve bytes", priority=2))
    capacity = engine.capacity()

    assert (0, 0, 1) == (capacity.free_seqs, capacity.free_tokens, capacity.waiting_seqs)
    # of 30 tokens the standard one holds 10
    assert (Freeable(2, 30, 1), Freeable(1, 20, 1)) == capacity.freeable
    assert Freeable() == capacity.freeable_by(2)


def test_its_tokenizer_can_be_written_down() -> None:
    """
    A library that reads its tokenizer.json gives the same bytes, of any text.
    """
    read = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json())

    for text in ("", "words and spaces", "Größe, 東京 🙂", "\x00\n\t\x7f\xad", "".join(map(chr, range(1, 600)))):
        assert list(text.encode()) == read.encode(text).ids
        assert text == read.decode(read.encode(text).ids)
