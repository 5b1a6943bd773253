"""The examples of docs/wire.md are programs that work."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pagemill.schema import Job, Result, Usage
from pagemill.versions import SCHEMA_VERSION
from tests.support.servers import oldest_redis

PAGE = Path(__file__).resolve().parent.parent / "docs" / "wire.md"

# the oldest server's package has a redis-cli
PATH = f"{oldest_redis().parent}:{os.environ['PATH']}"


def example(language: str) -> str:
    [code] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(code)


def run_program(*command: str, url: str) -> Result:
    place = urlsplit(url)
    done = subprocess.run(
        command,
        env={
            "PATH": PATH,
            "PAGEMILL_REDIS_URL": url,
            "REDIS_HOST": str(place.hostname),
            "REDIS_PORT": str(place.port),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return Result.model_validate_json(done.stdout)


def test_a_shell_is_a_producer(served_url: str) -> None:
    """
    redis-cli writes a job and reads its result.
    """
    code = example("sh").replace("redis-cli", f"redis-cli -p {urlsplit(served_url).port}")

    result = run_program("sh", "-euc", code, url=served_url)

    assert ("done", 60) == (result.status, result.usage.completion_tokens)


def test_a_socket_is_enough(served_url: str) -> None:
    """
    bash alone, byte by byte, does the same.
    """
    result = run_program("bash", "-uc", example("bash"), url=served_url)

    assert ("done", 60) == (result.status, result.usage.completion_tokens)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_node_is_a_producer(served_url: str) -> None:
    """
    A program of another language, without a library, waits on the job's channel.
    """
    result = run_program("node", "-e", example("js"), url=served_url)

    assert ("done", True) == (result.status, result.job_id.startswith("node-"))


def test_the_result_shown_is_one() -> None:
    """
    The example of a result is what the schema takes.
    """
    result = Result.model_validate_json(example("json"))

    assert ("done", SCHEMA_VERSION) == (result.status, result.version)
    assert set(Usage.model_fields) == result.usage.model_fields_set


def test_the_page_names_every_field_of_a_job() -> None:
    """
    A field that is added to the job is explained there.
    """
    named = set(re.findall(r"`([a-z_]+)`", PAGE.read_text(encoding="utf-8")))

    # where a large result goes is the operator's matter
    assert set() == set(Job.model_fields) - named - {"result_store"}
