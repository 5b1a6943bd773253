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
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.stack import flows
from tests.stack.flows import Stack
from tests.stack.native import NativeStack
from tests.support import server_box
from tests.support.celery_box import Caller
from tests.support.compose import Service, load
from tests.support.models import real_model
from worker.models import models_root

MODEL = "smollm2"

# each service has a /tmp of its own, which volumes cannot be below
FOLDERS = "/var/tmp"

# an engine without a model, slow enough that a worker can be caught at work
FAKE_ENGINE = {"PAGEMILL_ENGINE": "fake", "PAGEMILL_FAKE_TOKENS_PER_S": "400", "PAGEMILL_MODEL": "fake"}

# less time than the jobs of a worker that is stopped still need, as a user may set it in .env
SHORT_DRAIN = {"DRAIN_S": "1"}

EVERY_MINUTE = json.dumps([{"name": "nightly", "cron": "* * * * *"}])


def run(folder: Path, *, fake: bool) -> dict[str, Any]:
    """
    Start the stack, use it, take its worker away, and stop it.

    Args:
        fake: Neither a model nor the minute that the beat takes.

    Returns:
        What was done, as counts and seconds.
    """
    watched = server_box.find("prometheus") is not None
    services = _services(fake=fake, watched=watched)
    started = time.monotonic()
    with _native(folder, services, fake=fake) as native:
        counts: dict[str, Any] = {"services": len(services), "read_only": native.sealed}
        counts["up_s"] = round(time.monotonic() - started, 1)
        stack = Stack(native, "fake" if fake else MODEL)
        os.environ["AWS_SHARED_CREDENTIALS_FILE"] = str(stack.credentials)
        with flows.foreign_app(stack) as caller:
            counts |= use(stack, caller, fake=fake, watched=watched)
    flows.clean_end(native.ended)
    return counts | {"stop_s": {name: round(one.seconds, 1) for name, one in sorted(native.ended.items())}}


def _services(*, fake: bool, watched: bool) -> dict[str, Service]:
    """Those of the file that can be had here; Grafana cannot."""
    services = load(*(["obs"] if watched else []), environ=SHORT_DRAIN if fake else {})
    services.pop("grafana", None)
    if fake:
        del services["model-cpu"]
        worker = services["worker-cpu"]
        rest = {name: condition for name, condition in worker.depends_on.items() if name in services}
        services["worker-cpu"] = replace(worker, depends_on=rest)
    return services


def _native(folder: Path, services: Mapping[str, Service], *, fake: bool) -> NativeStack:
    if fake:
        # SeaweedFS takes a quarter of a minute to stop, and that is nothing of ours
        return NativeStack(folder, services, environ={"worker-cpu": FAKE_ENGINE}, hurried=("s3",))
    real_model()
    # a volume that an earlier start has filled
    volumes = {"models": models_root().parent}
    return NativeStack(folder, services, environ={"beat": {"PAGEMILL_CELERY_BEAT": EVERY_MINUTE}}, volumes=volumes)


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
        steps["bulk_stop"] = lambda: flows.bulk_goes(stack, caller)
    if watched:
        steps["prometheus"] = lambda: flows.is_watched(stack)
    counts = {}
    for name, step in steps.items():
        began = time.monotonic()
        counts[name] = step()
        print(f"{name}: {counts[name]}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fake",
        action="store_true",
        help="an engine without a model; neither the beat, nor a killed worker, nor a stopped bulk job",
    )
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
