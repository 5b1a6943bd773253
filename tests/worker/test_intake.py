"""From deliveries to requests, without a queue."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from engine.errors import EmptyPrompt, PromptTooLong
from engine.grammar import Grammar
from engine.request import FinishReason, Progress
from pagemill.messages import Delivery
from pagemill.object_store import FileStore
from pagemill.schema import MAX_PAYLOAD_BYTES, Options
from tests.support.deliveries import delivery, intake
from worker.checkpoints import FORMAT, encode
from worker.fake_engine import ByteTokenizer
from worker.intake import Accepted, Deferred, Intake, Refused, fit


def payload(**fields: Any) -> bytes:
    return json.dumps({"version": 1, **fields}).encode()


def accepted(one: Intake, job: Delivery) -> Accepted:
    (prepared,) = one.prepare([job])
    assert isinstance(prepared, Accepted)
    return prepared


def test_a_job_becomes_a_request() -> None:
    """
    Prompt, options, lane and the queue's seed arrive in the request.
    """
    job = accepted(intake(), delivery(payload(prompt="hi", lane="bulk", options={"max_tokens": 5, "top_k": 3})))

    assert b"hi" == bytes(job.request.prompt.astype(np.uint8))
    assert (5, 3, 77) == (job.request.params.max_tokens, job.request.params.top_k, job.request.params.seed)
    assert 2 == job.request.priority


def test_a_jobs_own_seed_goes_before_the_queues() -> None:
    """
    The seed of the options is used where there is one.
    """
    assert 5 == accepted(intake(), delivery(payload(prompt="hi", options={"seed": 5}))).request.params.seed


def test_a_chat_is_rendered() -> None:
    """
    Messages go through the tokenizer's chat template.
    """
    job = accepted(intake(), delivery(payload(messages=[{"role": "user", "content": "hi"}])))

    assert b"user: hi\n" == bytes(job.request.prompt.astype(np.uint8))


def test_one_bad_job_leaves_the_others_alone() -> None:
    """
    Deliveries are prepared one by one, in order, and none is left out.
    """
    jobs = [delivery(payload(prompt="a")), delivery(b"\xff"), delivery(payload(prompt="b"))]
    prepared = intake().prepare(jobs)

    assert [Accepted, Refused, Accepted] == [type(one) for one in prepared]


def test_a_fault_of_ours_fails_that_job_alone() -> None:
    """
    An exception that nobody expected becomes an engine_error of the job that met it.
    """

    class Broken(ByteTokenizer):
        def encode(self, text: str) -> Any:
            raise ZeroDivisionError(text)

    (prepared,) = Intake(Broken(), frozenset(), 100, "print").prepare([delivery(payload(prompt="x"))])

    assert isinstance(prepared, Refused)
    assert "engine_error" == prepared.failure.code


def test_a_payload_is_fetched_from_the_store(tmp_path: Path) -> None:
    """
    A reference is followed; one to nothing is a failure, and a store that is away is not.
    """
    store = FileStore(tmp_path)
    ref = store.put("one", payload(prompt="far"))
    gone = ref.replace("one", "two")
    away = intake(None)

    assert b"far" == bytes(accepted(intake(store), delivery(payload_ref=ref)).request.prompt.astype(np.uint8))
    assert ["lost_payload"] == [
        one.failure.code for one in intake(store).prepare([delivery(payload_ref=gone)]) if isinstance(one, Refused)
    ]
    assert [Deferred] == [type(one) for one in away.prepare([delivery(payload_ref=ref)])]


def test_a_huge_object_is_not_read_whole(tmp_path: Path) -> None:
    """
    Of an object that is larger than a payload may be, no more is read than tells that.
    """
    lengths = []

    class Counting(FileStore):
        def get_range(self, url: str, start: int, length: int) -> bytes:
            lengths.append(length)
            return super().get_range(url, start, length)

    store = Counting(tmp_path)
    ref = store.put("huge", b"x" * (MAX_PAYLOAD_BYTES + 1000))
    (prepared,) = intake(store).prepare([delivery(payload_ref=ref)])

    assert isinstance(prepared, Refused)
    assert ("payload_too_large", [MAX_PAYLOAD_BYTES + 1]) == (prepared.failure.code, lengths)


def test_tenants_share_no_prompts_unless_the_operator_says_so() -> None:
    """
    Cached blocks are found by prompts of the same tenant alone; with shared_tenants by all.
    """
    job = delivery(payload(prompt="hi"), tenant="acme")
    shared = Intake(ByteTokenizer(), frozenset(), 100, "print", shared_tenants=True)

    assert "acme" == accepted(intake(), job).request.cache_salt
    assert accepted(shared, job).request.cache_salt is None


def checkpointed(one: Intake, answers: list[Progress], *, prompt: str = "hi", **options: Any) -> Delivery:
    """A job with the prompt "hi" and a checkpoint made for another one or the same."""
    return delivery(
        payload(prompt="hi", options={"max_tokens": 8, **options}),
        checkpoint=b"".join(encode(index, answer) for index, answer in enumerate(answers)),
        checkpoint_meta=one.checkpoint_meta(ByteTokenizer().encode(prompt)),
    )


def test_a_checkpoint_of_this_prompt_and_model_is_resumed() -> None:
    """
    Answers are taken over only where the text beside them names the same prompt, model and format.
    """
    one, answers = intake(), [Progress((104, 105)), Progress((106,), (), FinishReason.STOP)]
    mine = checkpointed(one, answers, n=2)
    others = [
        checkpointed(one, answers, prompt="ho", n=2),
        checkpointed(replace(one, fingerprint="print-2"), answers, n=2),
        replace(mine, checkpoint_meta=mine.checkpoint_meta.removeprefix(f"{FORMAT}:")),
    ]

    assert tuple(answers) == accepted(one, mine).request.resumed
    assert [(), (), ()] == [accepted(one, other).request.resumed for other in others]


def test_grammars_come_as_the_engine_takes_them() -> None:
    """
    A schema as JSON with its properties in their order, choices as a JSON array; without them there is none.
    """
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    given: dict[str, tuple[Any, str]] = {
        "json_schema": (schema, json.dumps(schema)),
        "regex": ("a|b", "a|b"),
        "choice": (["yes", "nö"], json.dumps(["yes", "nö"])),
    }

    for kind, (value, text) in given.items():
        job = delivery(json.dumps({"prompt": "hi", "options": {kind: value}}).encode())
        assert Grammar(kind, text) == accepted(intake(), job).request.params.grammar  # type: ignore[arg-type]
    assert accepted(intake(), delivery(payload(prompt="hi"))).request.params.grammar is None


def test_a_checkpoint_of_another_grammar_library_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    It might not take the tokens that are there; answers without a grammar do not depend on it.
    """
    one, prompt, options = intake(), ByteTokenizer().encode("hi"), {"regex": "a*"}
    mine = delivery(
        json.dumps({"prompt": "hi", "options": options}).encode(),
        checkpoint=encode(0, Progress((97,))),
        checkpoint_meta=one.checkpoint_meta(prompt, Grammar("regex", "a*")),
    )
    plain = checkpointed(one, [Progress((97,))])

    assert (Progress((97,)),) == accepted(one, mine).request.resumed

    monkeypatch.setattr("worker.intake._grammar_library", lambda: "xgrammar-9.9")
    assert () == accepted(one, mine).request.resumed
    assert (Progress((97,)),) == accepted(one, plain).request.resumed


@pytest.mark.parametrize(
    ("version", "options", "code"),
    [
        (1, {"json_schema": {}}, "invalid_job"),
        (1, {"regex": "a"}, "invalid_job"),
        (2, {"regex": "a(?=b)"}, "invalid_grammar"),
        (2, {"regex": "a", "choice": ["a"]}, "invalid_job"),
    ],
)
def test_a_grammar_that_none_can_follow_is_refused(version: int, options: dict[str, Any], code: str) -> None:
    """
    Also of a program without our client, and of a version that had no grammars.
    """
    (prepared,) = intake().prepare(
        [delivery(json.dumps({"version": version, "prompt": "x", "options": options}).encode())]
    )

    assert isinstance(prepared, Refused)
    assert code == prepared.failure.code


def test_a_checkpoint_that_cannot_be_read_is_not_used() -> None:
    """
    Where bytes are missing, or log-probabilities that the job asks for, it starts from the prompt.
    """
    one, answers = intake(), [Progress((104,))]
    cut = checkpointed(one, answers)

    assert () == accepted(one, replace(cut, checkpoint=cut.checkpoint[:-1])).request.resumed
    assert () == accepted(one, checkpointed(one, answers, logprobs=1)).request.resumed


def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_by_somebody() -> None:
    """
    They come with the prompt: where no answer would compute it any more, the job starts from there.
    """
    one, going, over = intake(), Progress((104,)), Progress((105,), (), FinishReason.STOP)
    too_long = Progress((104,) * 98)

    for answers, resumed in (([going, over], True), ([over, over], False), ([too_long, over], False)):
        job = checkpointed(one, answers, n=2, prompt_logprobs=0)
        assert resumed == bool(accepted(one, job).request.resumed)
    assert accepted(one, checkpointed(one, [over, over], n=2)).request.resumed


def test_a_long_prompt_is_an_error_unless_the_job_says_what_to_cut() -> None:
    """
    "error" refuses with both numbers, "left" and "right" cut at that end so that the answer fits.
    """
    prompt = np.arange(200, dtype=np.int32)

    with pytest.raises(PromptTooLong, match="200 tokens"):
        fit(prompt, Options(max_tokens=10), 100, None)
    assert [110, 199] == fit(prompt, Options(max_tokens=10, truncate="left"), 100, None)[[0, -1]].tolist()
    assert [0, 89] == fit(prompt, Options(max_tokens=10, truncate="right"), 100, None)[[0, -1]].tolist()


def test_the_bos_token_survives_a_cut_from_the_left() -> None:
    """
    A prompt that began with BOS still does, and is not longer for that.
    """
    cut = fit(np.arange(200, dtype=np.int32), Options(max_tokens=10, truncate="left"), 100, 0)

    assert (90, 0, 111) == (len(cut), cut[0], cut[1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_a_prompt_that_does_not_fit_is_cut(side: Literal["left", "right"]) -> None:
    """
    A prompt with room for one answer token stays whole, and a cut one keeps half of the context.
    """
    options = Options(max_tokens=4096, truncate=side)

    assert 1500 == len(fit(np.arange(1500, dtype=np.int32), options, 2048, None))
    assert 2047 == len(fit(np.arange(2047, dtype=np.int32), options, 2048, None))
    assert 1024 == len(fit(np.arange(2048, dtype=np.int32), options, 2048, None))


@pytest.mark.parametrize(("side", "kept"), [("left", 8), ("right", 1)])
def test_bos_is_not_left_alone(side: Literal["left", "right"], kept: int) -> None:
    """
    Where one token of prompt has room, it is one of the job's own.
    """
    cut = fit(np.arange(9, dtype=np.int32), Options(max_tokens=500, truncate=side), 2, 0)

    assert [kept] == cut.tolist()


def test_a_prompt_that_fits_is_left_as_it_is() -> None:
    """
    Prompts that leave room for one answer token pass, and empty ones do not.
    """
    assert 99 == len(fit(np.arange(99, dtype=np.int32), Options(), 100, None))
    with pytest.raises(EmptyPrompt):
        fit(np.arange(0, dtype=np.int32), Options(), 100, None)
