"""The examples of docs/wire.md are programs that work."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import pytest
from pydantic import BaseModel

from pagemill import keys
from pagemill.client import Client
from pagemill.schema import Failure, FailureCode, Result, Usage
from pagemill.versions import CODES_SINCE, JOB_FIELDS_SINCE, SCHEMA_VERSION
from tests.support import server_box
from tests.support.pages import below
from tests.support.servers import oldest_redis
from tests.support.wire_fields import MODELS, fields

PAGE = Path(__file__).resolve().parent.parent / "docs" / "wire.md"

# the oldest server's package has a redis-cli
NODE = server_box.find("node")
PATH = f"{oldest_redis().parent}:{os.environ['PATH']}"


def example(language: str, section: str = "One job") -> str:
    """The block of a language below a heading."""
    [code] = [block.code for block in below(PAGE, section) if block.language == language]
    return code


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


@pytest.mark.skipif(NODE is None, reason="there is no Node: `python -m tests.support.server_box` fetches it")
def test_node_is_a_producer(served_url: str) -> None:
    """
    A program of another language, without a library, waits on the job's channel.
    """
    result = run_program(str(NODE), "-e", example("js"), url=served_url)

    assert ("done", True) == (result.status, result.job_id.startswith("node-"))


def shell(section: str, url: str, folder: Path) -> str:
    """What the example of a section prints."""
    code = example("sh", section).replace("redis-cli", f"redis-cli -p {urlsplit(url).port}")
    environ = {
        "PATH": f"{sys.prefix}/bin:{PATH}",
        "PAGEMILL_REDIS_URL": url,
        "PYTHONPATH": str(PAGE.parent.parent),
    }
    done = subprocess.run(
        ["sh", "-euc", code], cwd=folder, env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_a_shell_reads_a_stream_and_cancels(served_url: str, tmp_path: Path) -> None:
    """
    The last entry says how the job ended; what has ended stays as it is.
    """
    streamed = shell("Text while it is generated", served_url, tmp_path)

    assert ["end", "done"] == streamed.split()[-2:]
    assert "done" == shell("Cancelling", served_url, tmp_path).strip()


def test_a_shell_is_told_by_a_reply(served_url: str, tmp_path: Path) -> None:
    """
    The reply has the text that was given to the job.
    """
    words = shell("Streams of replies", served_url, tmp_path).split("\n")

    assert ["st", "done", "context", "order 7"] == words[-5:-1]


def test_a_shell_fills_a_batch(served_url: str, tmp_path: Path) -> None:
    """
    The batch counts both jobs, and ends when it is sealed.
    """
    shell("Batches", served_url, tmp_path)

    with Client(served_url) as client:
        [ended] = client.list_batches()
    assert (2, 2, "ended") == (ended.total, ended.done, ended.state)


def test_the_result_shown_is_one() -> None:
    """
    The example of a result is what the schema takes.
    """
    result = Result.model_validate_json(example("json", "The result"))

    assert ("done", SCHEMA_VERSION) == (result.status, result.version)
    assert set(Usage.model_fields) == result.usage.model_fields_set


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_page_has_every_field_as_the_schema_has_it(model: type[BaseModel]) -> None:
    """
    Name, type with its bounds and default, in the schema's order; the codes of failures have a table of their own.
    """
    [table] = re.findall(rf"^<!-- fields: {model.__name__} -->\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")[:3]) for line in table.splitlines()[2:]]

    wanted = [(f"`{name}`", kind, default) for name, kind, default in fields(model)]
    if model is Failure:
        wanted[0] = ("`code`", "one of the codes below", "needed")
    assert wanted == rows


def test_the_page_has_every_code_of_a_failure() -> None:
    """
    With when it comes.
    """
    [table] = re.findall(r"^<!-- codes -->\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)

    assert set(get_args(FailureCode)) == set(re.findall(r"^\| `(\w+)` \| \S", table, re.MULTILINE))


def test_the_page_has_every_key_that_it_needs() -> None:
    """
    Names of keys that the page gives are those of keys.py.
    """
    names = set(re.findall(r"\{pagemill:(?:<queue>|default)\}:([a-z]+)", PAGE.read_text()))

    assert {"in", "r", "ch", "ev", "j", "t", "b", "chb", "reply", "dead"} == names
    assert all(re.search(rf"^    {name}(:<\w+>)? ", keys.__doc__ or "", re.MULTILINE) for name in names)


def test_versions_are_told() -> None:
    """
    What a version added stands in its row.
    """
    _, _, chapter = PAGE.read_text().partition("## Versions")

    rows = dict(re.findall(r"^\| (\d+) \| ?(.*?) ?\|$", chapter, re.MULTILINE))
    assert str(SCHEMA_VERSION) == max(rows)
    for name, version in (*JOB_FIELDS_SINCE.items(), *((code, since) for code, (since, _) in CODES_SINCE.items())):
        assert f"`{name.removeprefix('options.')}`" in rows[str(version)], name
