"""The two clients are one library: the same verbs, in threads, in forked processes and on asyncio."""

import inspect
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import pagemill
from pagemill import client_core
from pagemill.async_client import AsyncClient
from pagemill.client import Client
from pagemill.client_core import Directory
from pagemill.keys import QueueKeys
from producers.local_redis import local_redis
from tests.support.servers import MakeConsumer, a_job

ROOT = Path(__file__).resolve().parents[2]


def verbs(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind, callable) if not name.startswith("_")}


def bare(annotation: str) -> str:
    return str(annotation).replace("AsyncIterator", "Iterator").replace("collections.abc.", "")


def test_the_clients_have_the_same_verbs() -> None:
    """
    Names, parameters, defaults and types are the same, but that one is awaited.
    """
    blocking, awaited = verbs(Client), verbs(AsyncClient)

    assert blocking.keys() == awaited.keys()
    for name, verb in blocking.items():
        one, other = inspect.signature(verb), inspect.signature(awaited[name])
        assert list(one.parameters.values()) == list(other.parameters.values()), name
        assert bare(one.return_annotation) == bare(other.return_annotation), name
        assert inspect.iscoroutinefunction(awaited[name]) or inspect.isasyncgenfunction(awaited[name]), name
    assert inspect.signature(Client) == inspect.signature(AsyncClient)


def test_each_verb_says_what_it_does() -> None:
    """
    A docstring each, and one that takes a time says its unit.
    """
    for kind in (Client, AsyncClient):
        for name, verb in verbs(kind).items():
            text = verb.__doc__ or ""
            assert text.strip(), name
            waits = "wait_s" in inspect.signature(verb).parameters
            assert not waits or "wait_s" in text or "waits as" in text.lower(), name


FORKED = """
import os, sys
from pagemill.client import Client
url, queue = sys.argv[1:]
with Client(url, queue=queue) as client:
    mine = [client.submit(prompt=f"parent {n}").job_id for n in range(3)]
    pid = os.fork()
    for n in range(60):
        job_id = client.submit(prompt=f"{pid} {n}").job_id
        # an answer that belongs to the other process would be of another job
        assert client.status(job_id).job_id == job_id
        assert client.status(mine[n % 3]).state == "queued"
    if pid == 0:
        client.close()
        os._exit(0)
    _, code = os.waitpid(pid, 0)
    assert client.status(mine[0]).state == "queued"
    sys.exit(os.waitstatus_to_exitcode(code))
"""


def test_a_client_that_was_made_before_a_fork() -> None:
    """
    Parent and child use it at the same time, each on connections of its own.
    """
    with local_redis() as url:
        done = subprocess.run(
            [sys.executable, "-c", FORKED, url, "forked"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

        assert (0, "") == (done.returncode, done.stderr)
        with Client(url, queue="forked") as client:
            assert 123 == client.stats().totals["accepted"]


def test_threads_share_a_client(client: Client, consumer: MakeConsumer) -> None:
    """
    Each thread hears of its own jobs.
    """
    worker = consumer()
    wrong: list[str] = []

    def submit_and_wait(number: int) -> None:
        for round_ in range(20):
            accepted = client.submit(a_job(f"{number} {round_}"))
            if client.result(accepted.job_id, wait_s=30).job_id != accepted.job_id:
                wrong.append(accepted.job_id)

    threads = [Thread(target=submit_and_wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        worker.finish(*worker.pull())

    assert [] == wrong
    assert 160 == client.stats().totals["done"]


def test_threads_remember_where_jobs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What is remembered stays bounded, whoever adds to it.
    """
    monkeypatch.setattr(client_core, "MAX_HOMES", 50)
    directory, other = Directory("own"), QueueKeys("other")
    failed: list[BaseException] = []

    def settle(number: int) -> None:
        try:
            for job in range(5000):
                directory.settle(f"{number} {job}", other)
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=settle, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    directory.settle("last", other)

    assert [] == failed
    assert len(directory._homes) <= 50


def test_the_client_brings_nothing_heavy(tmp_path: Path) -> None:
    """
    Importing both clients loads no framework, and the object store's library only where it is used.
    """
    heavy = ("torch", "transformers", "celery", "fastapi", "boto3", "pyarrow", "engine", "worker", "producers")
    code = f"""
import sys
import pagemill.client, pagemill.async_client
print([name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "[]" == done.stdout.strip()


def test_the_wheel_has_the_client_alone(tmp_path: Path) -> None:
    """
    `pip install pagemill` brings the package, its scripts and its types, and none of the worker's.
    """
    pytest.importorskip("hatchling", reason="the wheel's build backend is not installed")
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
        [metadata] = [wheel.read(name).decode() for name in names if name.endswith("/METADATA")]

    folders = {name.partition("/")[0] for name in names}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "pagemill").rglob("*") if path.suffix in (".py", ".lua")}
    needs = {re.match(r"[\w-]+", line.split()[1])[0] for line in metadata.splitlines() if is_needed(line)}
    assert {"pagemill", f"pagemill-{pagemill.__version__}.dist-info"} == folders
    assert sources | {"pagemill/py.typed"} <= names
    assert {"boto3", "pydantic", "pydantic-settings", "redis", "rich", "typer"} == needs


def is_needed(line: str) -> bool:
    return line.startswith("Requires-Dist:") and "extra ==" not in line
