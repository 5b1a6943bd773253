"""Answers in a grammar, through the whole engine: every way to sample, to end, and to be disturbed."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import GrammarsUnavailable, InvalidGrammar
from engine.grammar import Grammar
from engine.grammar_compiler import CompiledGrammar, GrammarCompiler
from engine.llm_engine import LLMEngine
from engine.load import load_engine
from engine.request import FinishReason, Progress, Request, RequestOutput
from engine.sampling_params import SamplingParams
from tests.support import grammars
from tests.support.answers import assert_same_answers, run_all
from tests.support.cuda_engine import make_engine
from tests.support.grammars import CHOICE, DIGITS, GRAMMARS, JSON, LETTERS, follows, spell
from tests.support.tiny_models import save_tiny_model, save_tiny_writer

Make = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model("qwen3", path)
    return path


@pytest.fixture(params=["cpu", "cuda"])
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    """Makes an engine with either runner; the second has two steps in flight."""
    return lambda **options: make_engine(folder, cuda=request.param == "cuda", **options)


def a_request(name: str, grammar: Grammar | None, **params: object) -> Request:
    extra = {key: params.pop(key) for key in ("resumed", "priority") if key in params}
    chosen = SamplingParams(grammar=grammar, **params)  # type: ignore[arg-type]
    prompt = np.array([5 + len(name), 9, 30, *map(ord, name)], dtype=np.int32)
    return Request(name, prompt, chosen, **extra)  # type: ignore[arg-type]


def assert_in_grammar(output: RequestOutput, grammar: Grammar) -> None:
    for answer in output.completions:
        assert FinishReason.STOP is answer.finish_reason, answer
        assert follows(grammar, spell(answer.token_ids)), spell(answer.token_ids)


KINDS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 2.0, "seed": 4, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "biased away": {"logit_bias": dict.fromkeys(range(4, 60), -100.0)},
    "several": {"n": 4, "temperature": 1.0, "seed": 5},
    "with logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "not before": {"min_tokens": 30},
    "without eos": {"ignore_eos": True, "logit_bias": {3: 50.0}},
}


@pytest.mark.parametrize("grammar", [JSON, DIGITS, CHOICE], ids=["schema", "regex", "choice"])
def test_answers_follow_their_grammar_however_they_are_sampled(make: Make, grammar: Grammar) -> None:
    """
    Each ends by itself, as it is complete, and others beside it are what they are alone.
    """
    # the schema's integers have no end, so they are given one
    bound = {"logit_bias": {token: -30.0 for token in range(4, 199) if spell((token,)).isdigit()}}
    requests = [
        a_request(name, grammar, max_tokens=80, **(bound | params if grammar is JSON else params))  # type: ignore[operator]
        for name, params in KINDS.items()
    ]
    plain = [a_request(f"plain-{name}", None, max_tokens=40, **params) for name, params in KINDS.items()]  # type: ignore[arg-type]
    expected = run_all(make(), plain)

    engine = make()
    mixed = run_all(engine, [one for pair in zip(requests, plain, strict=True) for one in pair])

    for request in requests:
        assert_in_grammar(mixed[request.request_id], grammar)
    assert_same_answers(expected, {name: output for name, output in mixed.items() if name.startswith("plain")})
    assert 0 == engine.stats().kv_usage


def test_both_runners_give_the_same_answers(folder: Path) -> None:
    """
    However many steps are in flight.
    """
    requests = [
        a_request(name, GRAMMARS[place % 4], max_tokens=30, **params)  # type: ignore[arg-type]
        for place, (name, params) in enumerate(KINDS.items())
    ]
    expected = run_all(make_engine(folder, cuda=False), requests)

    for depth in (1, 2, 3):
        assert_same_answers(expected, run_all(make_engine(folder, cuda=True, depth=depth), requests))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_answers_are_those_of_the_undisturbed(folder: Path, mode: str) -> None:
    """
    Where blocks run out all the time.
    """
    requests = [
        a_request(f"{number}", GRAMMARS[number % 4], max_tokens=60, temperature=1.0, seed=number, priority=number % 3)
        for number in range(16)
    ]
    expected = run_all(make_engine(folder, cuda=False), requests)
    engine = make_engine(folder, cuda=False, num_blocks=24, mode=mode)

    assert_same_answers(expected, run_all(engine, requests))
    assert engine.stats().num_preemptions


def test_an_answer_cut_by_its_length_says_so(make: Make) -> None:
    """
    It is a beginning of the grammar's texts, and not complete.
    """
    output = run_all(make(), [a_request("a", DIGITS, max_tokens=3, logprobs=0)])["a"]

    [answer] = output.completions
    assert (3, FinishReason.LENGTH) == (len(answer.token_ids), answer.finish_reason)
    assert not follows(DIGITS, spell(answer.token_ids))
    assert 3 == len(answer.logprobs or ())


def test_an_answer_that_is_complete_with_its_last_token_has_stopped(make: Make) -> None:
    """
    Nothing could follow: that it is also at its length does not matter.
    """
    full = run_all(make(), [a_request("a", CHOICE, max_tokens=40)])["a"].completions[0]

    cut = run_all(make(), [a_request("a", CHOICE, max_tokens=len(full.token_ids))])["a"].completions[0]

    assert (full.token_ids, FinishReason.STOP) == (cut.token_ids, cut.finish_reason)


def test_eos_ends_a_text_that_could_go_on(make: Make) -> None:
    """
    Where EOS is likely it ends the answer as soon as the text is complete, and min_tokens holds it up.
    """
    likely = {"logit_bias": {grammars.EOS: 100.0}, "max_tokens": 20}

    outputs = run_all(make(), [a_request("a", LETTERS, **likely), a_request("b", LETTERS, min_tokens=5, **likely)])

    for name, length in (("a", 2), ("b", 6)):
        [answer] = outputs[name].completions
        assert (length, FinishReason.STOP) == (len(answer.token_ids), answer.finish_reason)
        assert grammars.EOS == answer.token_ids[-1]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_resumed_answer_goes_on_in_its_grammar(make: Make, grammar: Grammar) -> None:
    """
    From wherever it was cut, in each of its answers, also behind the end.
    """
    params = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 30, "logprobs": 1}
    whole = run_all(make(), [a_request("a", grammar, **params)])

    for cut in (0, 1, 3, 7, 100):
        resumed = tuple(
            Progress(answer.token_ids[:cut], (answer.logprobs or ())[:cut]) for answer in whole["a"].completions
        )
        again = run_all(make(), [a_request("a", grammar, resumed=resumed, **params)])
        assert_same_answers(whole, again)


def test_an_answer_resumed_from_elsewhere_ends_with_an_error(make: Make) -> None:
    """
    Its tokens are not of the grammar: nothing that follows could be.
    """
    engine = make()
    engine.add(a_request("a", CHOICE, resumed=(Progress((150, 151)),)))

    [answer] = run_all(engine, [])["a"].completions

    assert FinishReason.ERROR is answer.finish_reason
    assert "does not allow" in str(answer.error)


def test_where_the_vocabulary_cannot_go_on_the_answer_is_an_error(make: Make) -> None:
    """
    It says that the grammar is at fault, and not the model.
    """
    output = run_all(make(), [a_request("a", Grammar("regex", "ab[0-9]é"))])["a"]

    [answer] = output.completions
    assert FinishReason.ERROR is answer.finish_reason
    assert "grammar" in str(answer.error)


class Late(GrammarCompiler):
    """A compiler that is done when it is told so."""

    def __init__(self) -> None:
        super().__init__(grammars.pieces, {grammars.EOS})
        self.may_go_on = threading.Event()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        assert self.may_go_on.wait(30)
        return super()._compile(grammar)


@pytest.fixture
def late(folder: Path) -> tuple[LLMEngine, Late]:
    engine, compiler = make_engine(folder, cuda=False), Late()
    engine._compiling._compiler = compiler
    return engine, compiler


def test_others_run_while_a_grammar_is_compiled(late: tuple[LLMEngine, Late]) -> None:
    """
    It waits beside them, is counted among those that wait, and runs when it is ready.
    """
    engine, compiler = late
    before = engine.capacity()
    engine.add(a_request("bound", CHOICE, n=2))
    engine.add(a_request("free", None, max_tokens=5))
    capacity = engine.capacity()

    finished = []
    while not finished:
        finished += engine.step().finished

    assert (3, before.free_seqs) == (capacity.waiting_seqs, capacity.free_seqs)
    assert capacity.free_tokens < before.free_tokens
    assert ["free"] == [output.request_id for output in finished]
    assert engine.has_work
    compiler.may_go_on.set()
    assert_in_grammar(run_all(engine, [])["bound"], CHOICE)


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(late: tuple[LLMEngine, Late]) -> None:
    """
    With what it brought; its id is free then, and the grammar does not bring it back.
    """
    engine, compiler = late
    engine.add(a_request("a", CHOICE, n=2, prompt_logprobs=0, resumed=(Progress((20,)), Progress())))

    output = engine.abort("a")

    assert output is not None
    assert [(20,), ()] == [answer.token_ids for answer in output.completions]
    assert {FinishReason.ABORT} == {answer.finish_reason for answer in output.completions}
    assert (None, False) == (engine.abort("a"), engine.has_work)
    engine.add(a_request("a", None, max_tokens=4))
    compiler.may_go_on.set()
    assert 4 == len(run_all(engine, [])["a"].completions[0].token_ids)


def test_a_refused_grammar_is_told_by_a_step(late: tuple[LLMEngine, Late]) -> None:
    """
    The first time by a step, as it is known only then; the next time at the door.
    """
    engine, compiler = late
    bad = Grammar("regex", "a(?=b)")
    engine.add(a_request("a", bad))
    compiler.may_go_on.set()

    rejected = []
    while engine.has_work:
        rejected += engine.step().rejected

    [(name, error)] = rejected
    assert ("a", InvalidGrammar) == (name, type(error))
    with pytest.raises(InvalidGrammar, match="Lookahead"):
        engine.add(a_request("b", bad))
    with pytest.raises(InvalidGrammar, match="Lookahead"):
        engine.generate([np.array([5], np.int32)], SamplingParams(grammar=bad))


def test_a_fault_of_the_library_is_that_requests_alone(late: tuple[LLMEngine, Late]) -> None:
    """
    Whatever it raises.
    """
    engine, compiler = late
    broken: Future[CompiledGrammar] = Future()
    broken.set_exception(KeyError("a fault of the library"))
    compiler._futures[CHOICE] = broken

    with pytest.raises(InvalidGrammar, match="a fault of the library"):
        engine.add(a_request("a", CHOICE))

    assert 3 == len(run_all(engine, [a_request("b", None, max_tokens=3)])["b"].completions[0].token_ids)


def test_an_engine_without_a_tokenizer_follows_no_grammar(folder: Path) -> None:
    """
    Token ids have no text there.
    """
    engine = make_engine(folder, cuda=False)
    engine._compiling._compiler = None

    with pytest.raises(GrammarsUnavailable):
        engine.add(a_request("a", CHOICE))


def test_text_streams_and_stop_strings_end_it(tmp_path: Path) -> None:
    """
    With a tokenizer of bytes: what is streamed joins to the text, and a stop string cuts it as anywhere.
    """
    save_tiny_writer(tmp_path)
    engine = load_engine(EngineConfig(model=tmp_path, device="cpu", dtype="float32", kv_cache_bytes=64 << 20))
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("Which?")
    texts = ["größer als 東京", "größer als 🙂"]
    grammar = Grammar("choice", json.dumps(texts))
    for name, stop in (("whole", ()), ("cut", ("als",))):
        params = SamplingParams(grammar=grammar, stop=stop, max_tokens=60)
        engine.add(Request(name, prompt, params, stream=True))

    finished, streamed = {}, {"whole": "", "cut": ""}
    while engine.has_work:
        outputs = engine.step()
        finished |= {output.request_id: output.completions[0] for output in outputs.finished}
        for delta in outputs.deltas:
            streamed[delta.request_id] += delta.text

    assert finished["whole"].text in texts
    assert "größer " == finished["cut"].text
    assert streamed == {name: answer.text for name, answer in finished.items()}
    assert {FinishReason.STOP} == {answer.finish_reason for answer in finished.values()}
