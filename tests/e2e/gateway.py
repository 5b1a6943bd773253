"""
The official OpenAI client, unchanged, against a gateway process, a server and a worker with SmolLM2.

    python -m tests.e2e.gateway
"""

import io
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

from producers.child import Child
from producers.gateway.api_keys import entry, new_key
from producers.local_redis import local_redis
from tests.support.models import real_model

QUESTION: list[Any] = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
BATCH_LINES = 12
START_S = 120.0


def run(workdir: Path) -> dict[str, int]:
    """
    Do all that a user of OpenAI's API does, and check what came.

    Returns:
        Counts: chats, streams, stream events, completions, models, files, batches and their lines.
    """
    key = new_key()
    keys_file = workdir / "keys.toml"
    keys_file.write_text(entry("alice", key))
    port = _free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    flags = ["--model", str(real_model()), "--served-model-name", "smollm2", "--device", "cpu"]
    worker = [
        sys.executable,
        "-m",
        "worker",
        *flags,
        "--max-model-len",
        "2048",
        "--kv-cache-bytes",
        "256MiB",
        "--lease-s",
        "3",
    ]
    served = [sys.executable, "-m", "producers.gateway", "--keys-file", str(keys_file), "--port", str(port)]
    with (
        local_redis() as url,
        Child([*worker, *_place(url, workdir)], log=workdir / "worker.log", environ=environ) as worked,
        Child([*served, *_place(url, workdir)], log=workdir / "gateway.log", environ=environ, grace_s=20) as gateway,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as client,
    ):
        _await(lambda: _serves(client, gateway, worked), "a worker behind the gateway")
        counts = {"models": _models(client), "files": _files(client)}
        counts |= _chats(client) | _completions(client)
        counts |= _batches(client)
    log = (workdir / "gateway.log").read_text()
    assert key not in log, "the key is in the gateway's log"
    assert "Traceback" not in log, log[-3000:]
    return counts


def _place(url: str, workdir: Path) -> list[str]:
    return ["--redis-url", url, "--object-store", (workdir / "objects").as_uri()]


def _serves(client: openai.OpenAI, *processes: Child) -> bool:
    for process in processes:
        assert process.exit_code() is None, process.last_lines()
    try:
        return any(model.id == "smollm2" for model in client.models.list())
    except openai.APIConnectionError:
        return False


def _models(client: openai.OpenAI) -> int:
    assert "smollm2" == client.models.retrieve("smollm2").id
    unknown = _error_of(lambda: client.chat.completions.create(model="nobody", messages=QUESTION))
    assert (404, "model_not_found") == unknown
    assert (401, "invalid_api_key") == _error_of(client.with_options(api_key="pm-wrong").models.list)
    return len(list(client.models.list()))


def _files(client: openai.OpenAI) -> int:
    data = b"\x00line\r\n" * 1000
    made = client.files.create(file=("data.bin", data), purpose="user_data")
    assert data == client.files.content(made.id).read()
    assert made.id in [one.id for one in client.files.list()]
    assert client.files.delete(made.id).deleted
    assert made.id not in [one.id for one in client.files.list()]
    return 1


def _chats(client: openai.OpenAI) -> dict[str, int]:
    usual: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**usual, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content or ""
    assert "Paris" in text, text
    assert whole.usage is not None
    assert _prompt_tokens(QUESTION) == whole.usage.prompt_tokens
    assert whole.choices[0].logprobs is not None
    tokens = whole.choices[0].logprobs.content or []
    assert whole.usage.completion_tokens - len(tokens) in (0, 1), "one log-probability a token, but for the end"
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)

    events = list(client.chat.completions.create(**usual, stream=True, stream_options={"include_usage": True}))
    assert text == "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert whole.usage.completion_tokens == (events[-1].usage and events[-1].usage.completion_tokens)
    assert len(events) > 4, "the answer came in one piece"

    stopped = client.chat.completions.create(**usual | {"stop": ["Paris"]})
    assert "stop" == stopped.choices[0].finish_reason
    assert "Paris" not in (stopped.choices[0].message.content or "")
    long: list[Any] = [{"role": "user", "content": "long " * 4_000}]
    refused = _error_of(lambda: client.chat.completions.create(model="smollm2", messages=long))
    assert (400, "context_length_exceeded") == refused
    return {"chats": 2, "streams": 1, "events": len(events)}


def _error_of(call: Callable[[], Any]) -> tuple[int, str | None] | None:
    try:
        call()
    except openai.APIStatusError as error:
        return error.status_code, error.code
    return None


def _prompt_tokens(messages: list[Any]) -> int:
    """What the model's own tokenizer makes of a chat: one template, one BOS."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model())
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _completions(client: openai.OpenAI) -> dict[str, int]:
    made = client.completions.create(
        model="smollm2", prompt=["One, two, three,", "Once upon a"], max_tokens=6, temperature=0
    )
    assert "four" in made.choices[0].text
    assert "time" in made.choices[1].text
    scored = client.completions.create(model="smollm2", prompt="The sky is", max_tokens=0, echo=True, logprobs=1)
    assert "The sky is" == scored.choices[0].text
    assert scored.choices[0].logprobs is not None
    values = scored.choices[0].logprobs.token_logprobs or []
    assert values[0] is None, "nothing comes before the first token"
    assert len(values) == 3
    assert all(value is not None and value < 0 for value in values[1:])
    return {"completions": 3}


def _batches(client: openai.OpenAI) -> dict[str, int]:
    done = _ended(client, _batch(client, BATCH_LINES, max_tokens=4))
    assert "completed" == done.status, done
    assert done.request_counts is not None
    assert (BATCH_LINES, BATCH_LINES - 1, 1) == (
        done.request_counts.total,
        done.request_counts.completed,
        done.request_counts.failed,
    )
    answers = [json.loads(line) for line in client.files.content(done.output_file_id or "").text.splitlines()]
    assert [f"line {number}" for number in range(BATCH_LINES - 1)] == [answer["custom_id"] for answer in answers]
    assert all(answer["response"]["status_code"] == 200 for answer in answers)
    [error] = client.files.content(done.error_file_id or "").text.splitlines()
    assert 400 == json.loads(error)["response"]["status_code"]

    long = _batch(client, 64, max_tokens=400)
    _await(lambda: client.batches.retrieve(long.id).status == "in_progress", "the second batch")
    client.batches.cancel(long.id)
    cancelled = _ended(client, long)
    assert "cancelled" == cancelled.status, cancelled
    assert {done.id, long.id} <= {one.id for one in client.batches.list()}
    return {"batches": 2, "lines": BATCH_LINES}


def _batch(client: openai.OpenAI, num_lines: int, *, max_tokens: int) -> Any:
    """Requests, of which the last cannot be served."""
    lines = []
    for number in range(num_lines):
        body: dict[str, Any] = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": f"Count to {number}."}],
            "max_tokens": max_tokens,
        }
        if number == num_lines - 1:
            body["tools"] = [{"type": "function", "function": {"name": "f"}}]
        url = "/v1/chat/completions"
        lines.append(json.dumps({"custom_id": f"line {number}", "method": "POST", "url": url, "body": body}))
    file = client.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def _ended(client: openai.OpenAI, batch: Any) -> Any:
    def look() -> Any:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return _await(look, f"the end of {batch.id}")


def _await(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + START_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {START_S:.0f} s"
        time.sleep(0.1)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pagemill-e2e-") as folder:
        print(json.dumps(run(Path(folder))))
