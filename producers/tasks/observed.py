"""
The log and the traces of Celery's own programs.

What Celery logs of a task takes our form. The values that tasks get and give are prompts and answers:
they are left out unless `log_prompts` asks for them.
"""

import logging
import os
from typing import Any

from celery import signals

from pagemill import traces
from pagemill.logs import configure_logging, logs_prompts
from pagemill.settings import LogSettings
from producers.tasks.settings import CelerySettings

# where Celery tells what became of tasks
_OF_TASKS = ("celery.app.trace", "celery.worker.strategy", "celery.worker.request")
_VALUES = ("args", "kwargs", "return_value", "exc")


def observe(settings: CelerySettings) -> None:
    """Have the worker or the beat of this process log as we do, and export its spans where traces are on."""
    # weak references would let go of functions that nobody else holds
    signals.setup_logging.connect(set_up_logging, weak=False)
    for name in _OF_TASKS:
        logging.getLogger(name).addFilter(of_task)

    def begin(**_: Any) -> None:
        traces.start(settings.tracing, "pagemill-celery")

    def end(**_: Any) -> None:
        traces.stop()

    signals.worker_init.connect(begin, weak=False)
    for last in (signals.worker_process_shutdown, signals.worker_shutdown):
        last.connect(end, weak=False)


def set_up_logging(loglevel: int | str = "warning", logfile: str | None = None, **_: Any) -> None:
    """In place of what Celery does; its `-l` and `-f` are heeded."""
    given = LogSettings.load(strict=False)
    name = loglevel if isinstance(loglevel, str) else logging.getLevelName(loglevel)
    level = logging.getLevelNamesMapping().get(str(name).upper(), logging.WARNING)
    if "log_level" not in given.model_fields_set:
        known = "debug" if level <= logging.DEBUG else "info" if level <= logging.INFO else "warning"
        given = given.model_copy(update={"log_level": known})
    target = os.open(logfile, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if logfile else None
    configure_logging(given, libraries=level, target=target)


def of_task(record: logging.LogRecord) -> bool:
    """A filter that drops nothing: it names the task, and takes its values away."""
    told = record.args
    if isinstance(told, dict) and "id" in told:
        record.fields = {"task_id": told["id"], "task": told.get("name")}
        if not logs_prompts():
            record.args = {name: _shown(name, value) for name, value in told.items()}
    return True


def _shown(name: str, value: object) -> object:
    if name not in _VALUES or value is None:
        return value
    # an error's kind, of which Celery gives the repr
    return str(value).partition("(")[0] if name == "exc" else "..."
