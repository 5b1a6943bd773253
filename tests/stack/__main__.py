"""
The services of docker-compose.yml without containers: started, used, disturbed and stopped on this machine.

    python -m tests.stack              # the real model, all of it; minutes
    python -m tests.stack --fake       # an engine without a model; seconds

Docker Compose itself reads the file, and fills in its variables; commands, environments, health checks, order of
start, signals and times to stop are what it says. Ports and folders are of this machine, images are its programs,
and a read-only container is a process that may write into its volumes alone. Grafana is left out.

Progress goes to standard error; the last line, on standard output, is one line of JSON. Exits with 1 where anything
is wrong.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.stack import flows
from tests.stack.flows import Stack
from tests.stack.native import NativeStack
from tests.support import server_box
from tests.support.celery_box import Caller
from tests.support.compose import load
from tests.support.models import real_model
from worker.models import models_root

MODEL = "smollm2"

# an engine without a model, slow enough that a worker can be caught at work; /tmp is no place: services have their own
FAKE = {"PAGEMILL_ENGINE": "fake", "PAGEMILL_FAKE_TOKENS_PER_S": "400", "PAGEMILL_MODEL": "fake"}
# a quarter of a minute, which is nothing of ours
SLOW = ("s3",)

# what a user may set in .env: less time than the jobs of the worker that is stopped need
SHORT = {"DRAIN_S": "1"}
FOLDERS = "/var/tmp"  # noqa: S108

EVERY_MINUTE = json.dumps([{"name": "nightly", "cron": "* * * * *"}])


def run(folder: Path, *, fake: bool, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """
    Start the stack, use it, take its worker away, and stop it.

    Args:
        fake: Neither a model nor the minute that the beat takes.
        environ: Variables, as they would be in `.env`.

    Returns:
        What was done, as counts and seconds.
    """
    profiles = ["obs"] if server_box.find("prometheus") else []
    services = load(*profiles, environ=(SHORT if fake else {}) | dict(environ or {}))
    services.pop("grafana", None)
    said = {"worker-cpu": FAKE} if fake else {"beat": {"PAGEMILL_CELERY_BEAT": EVERY_MINUTE}}
    # a volume that an earlier start has filled
    volumes = {} if fake else {"models": models_root().parent}
    if fake:
        del services["model-cpu"]
        services["worker-cpu"] = _without(services["worker-cpu"], "model-cpu")
    else:
        real_model()
    started = time.monotonic()
    native = NativeStack(folder, services, environ=said, volumes=volumes, hurried=SLOW if fake else ())
    with native:
        counts: dict[str, Any] = {"services": len(services), "read_only": native.sealed}
        counts["up_s"] = round(time.monotonic() - started, 1)
        stack = Stack(native, "fake" if fake else MODEL)
        os.environ["AWS_SHARED_CREDENTIALS_FILE"] = str(stack.credentials)
        with flows.foreign_app(stack) as caller:
            counts |= use(stack, caller, fake=fake, watched=bool(profiles))
    flows.clean_end(native.ended)
    return counts | {"stop_s": {name: round(one.seconds, 1) for name, one in sorted(native.ended.items())}}


def use(stack: Stack, caller: Caller, *, fake: bool, watched: bool) -> dict[str, Any]:
    """All flows, one after the other."""
    size = {"num_jobs": 24, "max_tokens": 100} if fake else {"num_jobs": 64, "max_tokens": 64}
    steps: dict[str, Callable[[], Any]] = {
        "client": lambda: flows.from_the_client(stack),
        "celery": lambda: flows.from_celery(caller),
        "openai": lambda: flows.from_openai(stack),
        "bulk": lambda: flows.from_bulk(stack, caller if fake else None),
        "stop": lambda: flows.worker_goes(stack, **size),
    }
    if not fake:
        steps["kill"] = lambda: flows.worker_goes(stack, signal.SIGKILL, **size)
    if watched:
        steps["prometheus"] = lambda: flows.is_watched(stack)
    counts = {}
    for name, step in steps.items():
        began = time.monotonic()
        counts[name] = step()
        print(f"{name}: {counts[name]}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return counts


def _without(service: Any, other: str) -> Any:
    from dataclasses import replace

    return replace(service, depends_on={name: one for name, one in service.depends_on.items() if name != other})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="an engine without a model; no beat, no killed worker")
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pagemill-stack-", dir=FOLDERS) as folder:
        try:
            counts = run(Path(folder), fake=given.fake)
        except Exception as error:
            traceback.print_exc()
            counts = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(counts | {"seconds": round(time.monotonic() - started, 1)}))
    return 1 if "error" in counts else 0


if __name__ == "__main__":
    sys.exit(main())
