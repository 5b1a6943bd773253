"""The programs of the pages run: against real servers, with a fake engine where the model does not matter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from producers.child import Child
from producers.local_redis import local_redis
from tests.support.celery_box import CeleryBox, up
from tests.support.gateways import running_gateway
from tests.support.models import real_model
from tests.support.pages import ROOT, Block, all_blocks, below, blocks
from tests.support.programs import DOCS, PLAIN, WALKS, plain_blocks, run_python
from tests.support.servers import is_routed, wait_for
from tests.support.services import worker_process
from tests.support.walkthrough import Walkthrough

CLIENT = """
from pagemill.client import Client
from pagemill.schema import Job
client = Client()
texts = ["One river is", "One mountain is"]
"""


def marked(remark: str, page: Path | None = None) -> list[Block]:
    """The blocks with a remark, of a page or of all."""
    found = [block for block in all_blocks("python", "sh") if block.remark == remark]
    return [block for block in found if page in (None, block.page)]


def at(url: str, code: str) -> str:
    """A page's code at a server of the test."""
    return code.replace("localhost:6379", urlsplit(url).netloc)


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(page: Path, served_url: str, tmp_path: Path) -> None:
    """
    Every block of the page, in its order, with what the reader has by then.
    """
    codes = [at(served_url, block.code) for block in plain_blocks(page)]

    said = run_python(codes, prelude=CLIENT, folder=tmp_path, environ={"PAGEMILL_REDIS_URL": served_url})

    assert len(codes) > 0
    assert said or "print(" not in "".join(codes)


def test_the_first_program_of_the_client_prints_an_answer(served_url: str, tmp_path: Path) -> None:
    """
    What a newcomer copies first says something.
    """
    first = blocks(DOCS / "client.md")[0]

    said = run_python([at(served_url, first.code)], prelude="", folder=tmp_path, environ={})

    assert len(said.strip()) > 10


@pytest.mark.parametrize(("page", "heading"), WALKS.values(), ids=WALKS)
def test_a_page_can_be_followed(page: Path, heading: str, free_ports: tuple[str, str], tmp_path: Path) -> None:
    """
    In a folder like a checkout, with a server at the usual port; the worker has a fake engine.
    """
    for name in ("examples", "worker", "producers", "pagemill", "engine", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    with local_redis() as url:
        environ = kept | {
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PAGEMILL_REDIS_URL": url,
            "PAGEMILL_ENGINE": "fake",
            "PAGEMILL_SERVED_MODEL_NAME": "smollm2",
            "PAGEMILL_GATEWAY_PORT": free_ports[0],
        }
        steps = [step for step in below(page, heading) if step.remark != "with a store"]
        walk = Walkthrough(
            tmp_path, environ, ports={"8000": free_ports[0], "9464": free_ports[1]}, installs=False, answers=False
        )
        if page.name == "bulk.md":
            # the page has its reader start one before
            with worker_process(tmp_path / "log", "--redis-url", url, environment={"PAGEMILL_ENGINE": "fake"}):
                walk.follow(steps)
            assert (tmp_path / "summaries/manifest.json").is_file()
        else:
            walk.follow(steps)


def shell(code: str, folder: Path, url: str) -> str:
    environ = {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "PAGEMILL_REDIS_URL": url,
    }
    done = subprocess.run(
        ["bash", "-euc", code], cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def request(number: int) -> str:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.fixture
def ready_url(served_url: str) -> str:
    """The server, once its worker serves."""
    wait_for(lambda: is_routed(served_url), 60)
    return served_url


def test_a_batch_file_runs_as_migration_says(ready_url: str, tmp_path: Path) -> None:
    """
    vLLM's file of requests comes back as a file of responses, in its order.
    """
    (tmp_path / "input.jsonl").write_text("".join(f"{request(number)}\n" for number in range(5)))
    [block] = marked("a batch file")

    shell(block.code, tmp_path, ready_url)

    lines = [json.loads(line) for line in (tmp_path / "output.jsonl").read_text().splitlines()]
    assert [(str(number), 200) for number in range(5)] == [
        (line["custom_id"], line["response"]["status_code"]) for line in lines
    ]


def test_a_bulk_job_runs_as_migration_says(served_url: str, tmp_path: Path) -> None:
    """
    A folder of texts becomes Parquet.
    """
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("One text.")
    [block] = marked("a bulk job")

    shell(block.code, tmp_path, served_url)

    assert (tmp_path / "out/part-000000.parquet").is_file()


def test_the_gateways_batch_runs(served_url: str, tmp_path: Path) -> None:
    """
    With OpenAI's client, and a store.
    """
    (tmp_path / "requests.jsonl").write_text(request(1))
    [block] = marked("with a store")
    with running_gateway(served_url, "default", object_store=f"file://{tmp_path}/store", max_batches=0) as gateway:
        prelude = f"from openai import OpenAI\nclient = OpenAI(base_url='{gateway.url}/v1', api_key='unused')"
        run_python([f"{block.code}print(batch.status)"], prelude=prelude, folder=tmp_path, environ={})


@pytest.mark.slow
def test_celerys_programs_run(tmp_path: Path) -> None:
    """
    Those of celery.md and migration.md, with an ingress and without a service of the reader's.
    """
    with (
        local_redis() as url,
        Child([sys.executable, "-m", "worker", "--redis-url", url, "--engine", "fake"], log=None),
    ):
        place = url.removesuffix("/0")
        box = CeleryBox(tmp_path, url, "default", f"{place}/1", f"{place}/2")
        prelude = """
texts = ["One river is", "One mountain is"]
if "app" in globals():
    result = app.send_task("pagemill.generate", ["x" * 9000], queue="pagemill.ingress")
"""
        environ = {"CELERY_BROKER_URL": f"{place}/1", "CELERY_RESULT_BACKEND": f"{place}/2"}
        with up(box.ingress()):
            for page in (DOCS / "celery.md", DOCS / "migration.md"):
                codes = [at(url, block.code) for block in marked("with celery", page)]
                assert codes
                assert run_python(codes, prelude=prelude, folder=tmp_path, environ=environ)


@pytest.mark.slow
def test_an_answer_follows_a_schema(tmp_path: Path) -> None:
    """
    structured.md's program gets JSON of the model.
    """
    [block] = marked("with grammars")
    with local_redis() as url:
        flags = ("--redis-url", url, "--model", str(real_model()), "--kv-cache-bytes", "512MiB")
        with worker_process(tmp_path / "log", *flags):
            code = f"{block.code}print(result.status, sorted(data) if 'data' in globals() else 'cut')"
            said = run_python([code], prelude=CLIENT, folder=tmp_path, environ={"PAGEMILL_REDIS_URL": url})

    assert re.fullmatch(r"done (\['city', 'year'\]|cut)\n", said)
