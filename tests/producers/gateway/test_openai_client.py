"""The official client, unchanged, against a real gateway, server and worker with the fake engine."""

import asyncio
from typing import Any

import openai
import pytest

from tests.support.gateways import RunningGateway

HI: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]


def test_chat(client: openai.OpenAI) -> None:
    """
    A chat gets as many answers as it asks for, and what they took.
    """
    made = client.chat.completions.create(model="fake", messages=HI, max_completion_tokens=12, n=2, seed=5)

    assert ("chat.completion", "fake") == (made.object, made.model)
    assert [(0, "assistant", 12, "length"), (1, "assistant", 12, "length")] == [
        (one.index, one.message.role, len(one.message.content or ""), one.finish_reason) for one in made.choices
    ]
    assert made.usage is not None
    assert (24, made.usage.prompt_tokens + 24) == (made.usage.completion_tokens, made.usage.total_tokens)
    assert made.created > 1_700_000_000


def test_chat_streams_its_text(client: openai.OpenAI) -> None:
    """
    The pieces, in order, are the answer that comes at once; the last event has the usage and no choice.
    """
    whole = client.chat.completions.create(model="fake", messages=HI, max_tokens=200, seed=5)

    events = list(
        client.chat.completions.create(
            model="fake", messages=HI, max_tokens=200, seed=5, stream=True, stream_options={"include_usage": True}
        )
    )

    deltas = [event.choices[0].delta for event in events[:-1]]
    assert whole.choices[0].message.content == "".join(delta.content or "" for delta in deltas)
    assert ["assistant"] == [delta.role for delta in deltas if delta.role]
    assert [None] * (len(events) - 2) + ["length"] == [event.choices[0].finish_reason for event in events[:-1]]
    assert len(events) > 4
    assert [] == events[-1].choices
    assert whole.usage == events[-1].usage
    assert 1 == len({event.id for event in events})


def test_answers_of_one_stream_are_told_apart(client: openai.OpenAI) -> None:
    """
    With n = 3 each event says which answer it belongs to.
    """
    whole = client.chat.completions.create(model="fake", messages=HI, max_tokens=50, n=3, seed=6)

    texts = {0: "", 1: "", 2: ""}
    for event in client.chat.completions.create(model="fake", messages=HI, max_tokens=50, n=3, seed=6, stream=True):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""

    assert [one.message.content for one in whole.choices] == list(texts.values())


def test_completions(client: openai.OpenAI) -> None:
    """
    Several prompts, texts or token ids, with several answers each, are one response in order.
    """
    made = client.completions.create(model="fake", prompt=["one", "two"], max_tokens=6, n=2, seed=1)
    by_ids = client.completions.create(model="fake", prompt=[list(b"one"), list(b"two")], max_tokens=6, n=2, seed=1)

    assert [0, 1, 2, 3] == [one.index for one in made.choices]
    assert [one.text for one in made.choices] == [one.text for one in by_ids.choices]
    assert 4 == len({one.text for one in made.choices})
    assert made.usage is not None
    assert (6, 24) == (made.usage.prompt_tokens, made.usage.completion_tokens)
    assert 16 == len(client.completions.create(model="fake", prompt="x").choices[0].text)


def test_completions_stream(client: openai.OpenAI) -> None:
    """
    The texts of two prompts come mixed, each under its own index.
    """
    whole = client.completions.create(model="fake", prompt=["one", "two"], max_tokens=90, seed=1)

    texts = {0: "", 1: ""}
    for event in client.completions.create(model="fake", prompt=["one", "two"], max_tokens=90, seed=1, stream=True):
        texts[event.choices[0].index] += event.choices[0].text

    assert [one.text for one in whole.choices] == list(texts.values())


def test_echo_puts_the_prompt_before_the_answer(client: openai.OpenAI) -> None:
    """
    Also alone, with no token of answer.
    """
    made = client.completions.create(model="fake", prompt="echo me", max_tokens=4, echo=True)
    alone = client.completions.create(model="fake", prompt="echo me", max_tokens=0, echo=True)

    assert made.choices[0].text.startswith("echo me")
    assert 11 == len(made.choices[0].text)
    assert ("echo me", "length") == (alone.choices[0].text, alone.choices[0].finish_reason)
    assert alone.usage is not None
    assert 0 == alone.usage.completion_tokens


def test_models(client: openai.OpenAI) -> None:
    """
    What workers have registered, and nothing else.
    """
    assert ["fake"] == [model.id for model in client.models.list()]
    assert "fake" == client.models.retrieve("fake").id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_many_calls_of_the_asyncio_client(gateway: RunningGateway) -> None:
    """
    A hundred at once, half of them streams.
    """

    async def scenario() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:

            async def call(number: int) -> int:
                prompt: list[Any] = [{"role": "user", "content": f"number {number}"}]
                if number % 2:
                    made = await client.chat.completions.create(model="fake", messages=prompt, max_tokens=20)
                    return len(made.choices[0].message.content or "")
                stream = await client.chat.completions.create(model="fake", messages=prompt, max_tokens=20, stream=True)
                return sum([len(event.choices[0].delta.content or "") async for event in stream])

            return list(await asyncio.gather(*map(call, range(100))))

    assert [20] * 100 == asyncio.run(scenario())


def test_an_idempotency_key_makes_repeats_one_job(client: openai.OpenAI) -> None:
    """
    The second call gets the first one's answer, and another request under that key is refused.
    """

    def call(text: str) -> openai.types.CompletionChoice:
        made = client.completions.create(
            model="fake", prompt=text, max_tokens=9, extra_headers={"Idempotency-Key": "once"}
        )
        return made.choices[0]

    assert call("same") == call("same")
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        call("another")
    assert "idempotency_key_reused" == caught.value.code


def test_what_the_worker_refuses_is_a_status_of_its_own(client: openai.OpenAI) -> None:
    """
    Also for a stream: as long as nothing was sent, an error is no event.
    """
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "x" * 9000}], stream=stream
            )
        assert "context_length_exceeded" == caught.value.code
        assert "9,007" in caught.value.message


def test_extras_of_other_engines_are_taken(client: openai.OpenAI) -> None:
    """
    As `extra_body` sends them.
    """
    extras = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2}

    made = client.chat.completions.create(model="fake", messages=HI, max_tokens=4, extra_body=extras)

    assert "length" == made.choices[0].finish_reason
