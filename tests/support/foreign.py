"""
Another service: a Celery app that knows two URLs and the names of tasks, and shares no code.

It imports Celery alone and is copied into a folder of its own, as `foreign.py`: a worker of it runs its
tasks (queue `foreign`), and `python foreign.py` plays the caller, which writes what it saw as JSON into a file.
"""

import json
import os
import sys
import time

from celery import Celery, chain, chord, group, signature
from celery.exceptions import TaskRevokedError

app = Celery("foreign", broker=os.environ["FOREIGN_BROKER"], backend=os.environ["FOREIGN_BACKEND"])
app.conf.update(
    task_default_queue="foreign",
    broker_connection_retry_on_startup=True,
    task_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=1,
)

WAIT_S = 60

# the worker takes 8,192 tokens, and counts a byte as one
TOO_LONG = "x" * 9000


@app.task(name="foreign.join")
def join(answers):
    """The body of a chord: the texts, end to end."""
    return [answer["text"] for answer in answers]


@app.task(name="foreign.shout")
def shout(answer, mark="!"):
    """A step of a chain."""
    return answer["text"].upper() + mark


@app.task(name="foreign.note")
def note(what):
    """A callback: gives what it was called with."""
    return {"noted": what}


def generate(*prompt, options=None):
    """A signature of our task, with nothing but its name and queue; without a prompt, for the step of a chain."""
    kwargs = {"options": {"max_tokens": 8} | (options or {})}
    return signature("pagemill.generate", args=prompt, kwargs=kwargs, queue="pagemill.ingress", app=app)


def failure_of(result):
    """How a task failed: the name of what is raised, and its args."""
    try:
        result.get(timeout=WAIT_S)
    except Exception as error:
        return type(error).__name__, list(error.args)
    raise SystemExit(f"{result.id} did not fail")


def plays_all(chord_size=20):
    """Every way in which a service may call, as a count each; raises at the first that goes wrong."""
    counts = {}

    sent = app.send_task("pagemill.generate", ["one"], {"options": {"max_tokens": 5}}, queue="pagemill.ingress")
    answer = sent.get(timeout=WAIT_S)
    assert len(answer["text"]) == 5, answer
    assert answer["usage"]["completion_tokens"] == 5, answer
    counts["get"] = 1

    texts = chord([generate(f"part {n}") for n in range(chord_size)], join.s())().get(timeout=WAIT_S)
    assert [len(text) for text in texts] == [8] * chord_size, texts
    assert len(set(texts)) == chord_size, texts
    counts["chord"] = len(texts)

    loud = chain(generate("first"), generate(), shout.s(mark="?"))().get(timeout=WAIT_S)
    assert loud.endswith("?"), loud
    assert loud == loud.upper(), loud
    counts["chain"] = 3

    many = group(generate(f"member {n}") for n in range(5)).apply_async().get(timeout=WAIT_S)
    assert len(many) == 5, many
    counts["group"] = len(many)

    assert failure_of(generate(TOO_LONG).apply_async())[0] == "PromptTooLong"
    name, args = failure_of(generate("x", options={"temprature": 1}).apply_async())
    assert (name, args[1]) == ("InvalidJob", "invalid_job"), (name, args)
    noted = app.AsyncResult(f"noted-{os.getpid()}-{time.time()}")
    failing = generate(TOO_LONG)
    failing.link_error(note.s().set(task_id=noted.id))
    failed = failing.apply_async()
    assert noted.get(timeout=WAIT_S) == {"noted": failed.id}
    body = chord([generate("good"), generate(TOO_LONG)], join.s())()
    # the body's own error, or that of the part which failed, whichever is there first
    assert failure_of(body)[0] in ("ChordError", "PromptTooLong")
    counts["failure"] = 4

    counts["revoke"] = plays_revoke()
    return counts


def plays_revoke():
    """A task that is revoked while its job runs ends as revoked, and its job does."""
    long = generate("x" * 50, options={"max_tokens": 8000}).apply_async()
    job_id = f"celery-{long.id}"
    wait_for(lambda: state_of(job_id) == "running", "a job that runs")
    long.revoke()
    try:
        long.get(timeout=WAIT_S)
    except TaskRevokedError:
        pass
    else:
        raise SystemExit("a revoked task gave a result")
    wait_for(lambda: state_of(job_id) == "cancelled", "the end of the job")
    assert long.state == "REVOKED", long.state
    return 1


def state_of(job_id):
    """A job's state, asked for by a task."""
    asked = app.send_task("pagemill.results", [[job_id]], queue="pagemill.ingress")
    return asked.get(timeout=WAIT_S)[0]["state"]


def wait_for(condition, what):
    """Ask until it is so."""
    until = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"waited for {what} in vain")


if __name__ == "__main__":
    path, *sizes = sys.argv[1:]
    seen = plays_all(*map(int, sizes))
    ours = sorted(name for name in sys.modules if name.split(".")[0] in ("pagemill", "producers", "worker", "engine"))
    assert not ours, ours
    with open(path, "w", encoding="utf-8") as file:
        json.dump(seen, file)
