"""`pagemill dead`: the operator's view of jobs that were given up."""

import json
from collections.abc import Callable

import pytest
from redis import Redis

from pagemill.client import Client
from pagemill.dead_letters import DeadLetter
from pagemill.keys import QueueKeys
from tests.support.servers import MakeConsumer, a_job

Run = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("settings")


@pytest.fixture
def dead(client: Client, consumer: MakeConsumer) -> list[DeadLetter]:
    """Two letters."""
    worker = consumer()
    client.submit_many([a_job("first"), a_job("second")])
    for job in worker.pull():
        worker.run(worker.consumer.bury(job, why="retries", message="8 attempts failed:\nout of memory"))
    return client.dead_letters()


def test_list_shows_a_line_a_letter(run: Run, dead: list[DeadLetter]) -> None:
    """
    Entry, reason, job, lane, time and the first line of the message; as JSON without payloads.
    """
    code, shown, _ = run("dead", "list")
    as_json = [json.loads(line) for line in run("dead", "list", "--limit", "1", "--json")[1].splitlines()]
    behind = run("dead", "list", "--after", dead[0].entry_id)[1]

    head, *lines = shown.splitlines()
    assert (0, ["entry", "why", "job", "lane", "given", "up", "message"]) == (code, head.split())
    assert [letter.entry_id for letter in dead] == [line.split()[0] for line in lines]
    assert all(line.endswith("8 attempts failed:") for line in lines)
    assert [(dead[0].entry_id, dead[0].job_id)] == [(one["entry_id"], one["job_id"]) for one in as_json]
    assert "payload" not in as_json[0]
    assert (True, False) == (dead[1].job_id in behind, dead[0].job_id in behind)


@pytest.mark.usefixtures("client")
def test_list_of_nothing(run: Run) -> None:
    """
    A queue without dead letters says so.
    """
    assert (0, "no dead letters\n", "") == run("dead", "list")


def test_show_has_all_of_a_letter(run: Run, dead: list[DeadLetter]) -> None:
    """
    The whole message, the history and the payload.
    """
    code, shown, _ = run("dead", "show", dead[0].entry_id)
    as_json = json.loads(run("dead", "show", dead[0].entry_id, "--json")[1])

    assert 0 == code
    for part in (dead[0].job_id, "out of memory", "attempt 1", dead[0].worker, '"prompt":"first"'):
        assert part in shown
    assert "first" == json.loads(as_json["payload"])["prompt"]


def test_show_keeps_bytes_that_are_no_text(run: Run, client: Client, redis: Redis, queue: str) -> None:
    """
    Garbage is printed with marks where it cannot be read, and whole as base64.
    """
    redis.xadd(QueueKeys(queue).dead, {"why": "garbage", "msg": "no JSON", "at": "5", "raw": b"\xff{"})
    [letter] = client.dead_letters()

    assert "\ufffd{" in run("dead", "show", letter.entry_id)[1]
    assert {"base64": "/3s="} == json.loads(run("dead", "show", letter.entry_id, "--json")[1])["raw"]


def test_requeue_runs_the_named_or_all(
    run: Run, client: Client, dead: list[DeadLetter], redis: Redis, queue: str
) -> None:
    """
    By entry id, or all that can be put back; a second time changes nothing, and what is no letter is an error.
    """
    garbage = redis.xadd(QueueKeys(queue).dead, {"j": "raw-1", "why": "garbage", "raw": b"{"})
    assert isinstance(garbage, bytes)
    one = run("dead", "requeue", dead[0].entry_id)
    rest = run("dead", "requeue", "--all")
    again = run("dead", "requeue", dead[0].entry_id)
    missing = run("dead", "requeue", "1-1", garbage.decode(), dead[0].entry_id)

    assert [(0, f"{letter.job_id} queued\n", "") for letter in dead] == [one, rest]
    assert (0, f"{dead[0].job_id} there already: queued\n", "") == again
    assert (1, again[1]) == missing[:2]
    assert ["no dead letter 1-1", "holds no job"] == [
        words for words in ("no dead letter 1-1", "holds no job") if words in missing[2]
    ]
    assert (2, [garbage]) == (
        client.stats().queued["standard"],
        [one.entry_id.encode() for one in client.dead_letters()],
    )


def test_purge_takes_the_named_the_old_or_all(run: Run, client: Client, dead: list[DeadLetter]) -> None:
    """
    Nothing is purged by omission.
    """
    assert 2 == run("dead", "purge")[0]
    assert 2 == run("dead", "purge", dead[0].entry_id, "--all")[0]
    assert (0, "0 purged\n", "") == run("dead", "purge", "--older-than-h", "1")
    assert 2 == client.stats().dead

    assert (0, "1 purged\n", "") == run("dead", "purge", dead[1].entry_id)
    assert (0, "1 purged\n", "") == run("dead", "purge", "--all")
    assert 0 == client.stats().dead
