"""Jobs and results on the wire: what is accepted, what is refused and how."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.client_core import prepare
from pagemill.errors import InvalidJob
from pagemill.schema import MAX_PAYLOAD_BYTES, Completion, Failure, Job, Message, Result, Usage
from pagemill.versions import SCHEMA_VERSION


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({}, "invalid_job", "exactly one of prompt and messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "invalid_job", "exactly one"),
        ({"prompt": ""}, "empty_prompt", "the prompt is empty"),
        ({"prompt": []}, "empty_prompt", "the prompt is empty"),
        ({"messages": []}, "empty_prompt", "messages is empty"),
        ({"prompt": "x", "tempature": 1}, "invalid_job", "tempature: unknown field"),
        ({"prompt": "x", "options": {"max_token": 1}}, "invalid_job", "options.max_token: unknown field"),
        ({"prompt": "x", "options": {"max_tokens": 0}}, "invalid_job", "options.max_tokens"),
        ({"prompt": "x", "options": {"temperature": -1}}, "invalid_job", "options.temperature"),
        ({"prompt": "x", "options": {"min_tokens": 9, "max_tokens": 3}}, "invalid_job", "min_tokens is 9"),
        ({"prompt": "x", "options": {"json_schema": {"not": {}}}}, "invalid_grammar", "options.json_schema at #: not"),
        ({"prompt": "x", "options": {"regex": "(?=a)"}}, "invalid_grammar", "options.regex, position 0"),
        ({"prompt": "x", "options": {"choice": []}}, "invalid_grammar", "options.choice has 0 texts"),
        (
            {"prompt": "x", "options": {"regex": "a", "json_schema": {}}},
            "invalid_job",
            "json_schema and regex are given",
        ),
        ({"prompt": "x", "version": 99}, "unsupported_version", "version 99"),
        ({"prompt": "x", "options": {"max_tokens": 10**20}}, "invalid_job", "options.max_tokens"),
        ({"prompt": "x", "options": {"temperature": float("nan")}}, "invalid_job", "options.temperature"),
        ({"prompt": "x", "options": {"top_p": float("inf")}}, "invalid_job", "options.top_p"),
        ({"prompt": "x", "options": {"top_k": 2**31}}, "invalid_job", "options.top_k"),
        ({"prompt": "x", "options": {"logit_bias": {7: float("nan")}}}, "invalid_job", "options.logit_bias"),
        ({"prompt": "x", "options": {"logit_bias": {7: 101.0}}}, "invalid_job", "options.logit_bias"),
        ({"prompt": "x", "options": {"logit_bias": {-1: 1.0}}}, "invalid_job", "options.logit_bias"),
        ({"prompt": "x", "options": {"logit_bias": dict.fromkeys(range(1025), 1)}}, "invalid_job", "1,025 fields"),
        ({"prompt": "x", "options": {"stop": ["é" * 513]}}, "invalid_job", "a stop string has 1,026 bytes"),
        ({"prompt": "x", "metadata": {"a": "é" * 8192}}, "invalid_job", "metadata has 16,385 bytes"),
        ({"prompt": "x", "timeout_s": float("nan")}, "invalid_job", "timeout_s"),
        ({"prompt": "x", "lane": "express"}, "invalid_job", "lane"),
        ({"prompt": "x", "tenant": "a b"}, "invalid_job", "tenant"),
        ({"prompt": "x", "id": "a:b"}, "invalid_job", "id"),
    ],
)
def test_a_faulty_job_is_refused(fields: dict[str, Any], code: str, words: str) -> None:
    """
    Each fault has its code, and a message that names the field.
    """
    with pytest.raises(InvalidJob, match=words) as caught:
        Job.build(**fields)

    assert code == caught.value.code


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "invalid_job"),
        (b"{", "invalid_job"),
        (b"[]", "invalid_job"),
        (b'{"prompt": "\xff"}', "invalid_encoding"),
        (b'{"prompt": "x", "surprise": 1}', "invalid_job"),
        (b'{"version": 99, "prompt": "x"}', "unsupported_version"),
        (b" " * (MAX_PAYLOAD_BYTES + 1), "payload_too_large"),
    ],
)
def test_a_faulty_payload_is_refused(payload: bytes, code: str) -> None:
    """
    Whatever bytes come, reading them gives a job or a typed error.
    """
    with pytest.raises(InvalidJob) as caught:
        Job.parse(payload)

    assert code == caught.value.code


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(payload: bytes) -> None:
    """
    No payload makes parsing fail in another way.
    """
    with pytest.raises(InvalidJob):
        Job.parse(payload)


JOBS = st.builds(
    Job.build,
    prompt=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50),
    lane=st.sampled_from(["interactive", "standard", "bulk"]),
    options=st.fixed_dictionaries(
        {}, optional={"max_tokens": st.integers(1, 9), "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3)}
    ),
    metadata=st.dictionaries(
        st.sampled_from(["a", "b"]), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    ),
)


@settings(max_examples=50, deadline=None)
@given(JOBS)
def test_a_job_survives_the_wire(job: Job) -> None:
    """
    What is written is read back equal, and always says version and id.
    """
    payload = job.payload()

    assert job == Job.parse(payload)
    assert (SCHEMA_VERSION, job.id) == (json.loads(payload)["version"], json.loads(payload)["id"])


@pytest.mark.parametrize("fields", [{"prompt": "\ud800"}, {"prompt": "x", "metadata": {"a": "\ud800"}}])
def test_what_no_utf8_can_say_is_refused(fields: dict[str, Any]) -> None:
    """
    A text with a lone surrogate is refused before anything is sent.
    """
    with pytest.raises(InvalidJob) as caught:
        prepare(Job.build(**fields))

    assert "invalid_encoding" == caught.value.code


def test_a_result_survives_the_wire() -> None:
    """
    A result is read back equal, and always says its version.
    """
    answer = Completion(index=0, text="blue \u2028 \x00", finish_reason="length", token_ids=(1, 2))
    result = Result(
        job_id="j",
        status="failed",
        completions=(answer,),
        usage=Usage(prompt_tokens=1),
        failure=Failure(code="engine_error", message="why"),
    )

    assert result == Result.model_validate_json(result.payload())
    assert SCHEMA_VERSION == json.loads(result.payload())["version"]


def test_a_large_job_says_what_to_do() -> None:
    """
    A payload above the limit names both sizes.
    """
    with pytest.raises(InvalidJob, match=r"10,000,0\d\d bytes and the queue takes 8,388,608"):
        Job(prompt="x" * 10_000_000).payload()


def test_the_estimate_counts_bytes_and_answers() -> None:
    """
    A third of the bytes of each text, and the longest answer, as often as it is asked for.
    """
    text = Job.build(prompt="abcdefg", options={"max_tokens": 10, "n": 2})
    ids = Job.build(prompt=[1, 2, 3], options={"max_tokens": 10})
    chat = Job(messages=(Message(role="user", content="abc"),), options={"max_tokens": 10})  # type: ignore[arg-type]

    assert (23, 13, 19) == tuple(job.estimated_tokens() for job in (text, ids, chat))


def test_the_fingerprint_ignores_the_id() -> None:
    """
    Equal jobs under two ids are the same for an idempotency key; another prompt is not.
    """
    one, two, other = (prepare(Job.build(prompt=prompt)) for prompt in ("a", "a", "b"))

    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert one.job_id != two.job_id


@pytest.mark.parametrize(
    "payload",
    [
        b'{"prompt":[' + b",".join([b"[]"] * 300_000) + b"]}",
        b'{"messages":[' + b",".join([b"{}"] * 300_000) + b"]}",
        b'{"prompt":"x","metadata":{' + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}}",
        b'{"prompt":"x","options":{' + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}}",
        b'{"prompt":"x",' + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}",
        b'{"prompt":"x","options":{"logit_bias":{' + b",".join(b'"a%d":1' % i for i in range(100_000)) + b"}}}",
    ],
    ids=["tokens", "messages", "metadata", "options", "fields", "bias"],
)
def test_a_payload_of_many_faults_is_told_in_few_words(payload: bytes) -> None:
    """
    However many things are wrong, the message stays short enough to be kept and read.
    """
    with pytest.raises(InvalidJob) as caught:
        Job.parse(payload)

    assert "invalid_job" == caught.value.code
    assert len(str(caught.value)) < 2000
