"""OpenAI batch files for tests: inputs, runs as processes, and what they must have written."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.services import CHECKOUT

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def chat_line(number: int, *, model: str = "fake", max_tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A chat, whose custom_id and prompt are of its number."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell of {number * 7919 % 1009}."}],
        "max_tokens": max_tokens,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body} | fields


def plain_line(number: int, *, model: str = "fake", max_tokens: int = 4, **body: Any) -> dict[str, Any]:
    """A plain completion."""
    fields = {"model": model, "prompt": f"Number {number}", "max_tokens": max_tokens} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": PLAIN, "body": fields}


def write_lines(path: Path, lines: Iterable[Mapping[str, Any] | bytes]) -> Path:
    """A file of requests; bytes are written as they are."""
    with path.open("wb") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode())
            file.write(b"\n")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def ids_of(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def batch_command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "producers.batch_file", *arguments]


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    return clean | {"PYTHONPATH": str(CHECKOUT)}


def run_command(*arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    """`pagemill batch run` to its end."""
    command = [sys.executable, "-c", "from pagemill.cli import main; main()", "batch", "run", *arguments]
    return subprocess.run(
        command, cwd=CHECKOUT, env=environment(), input=stdin, capture_output=True, timeout=300, check=False
    )
