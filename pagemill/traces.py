"""Whether a program makes spans. OpenTelemetry is imported where one does, and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from pagemill.errors import SettingsError

if TYPE_CHECKING:
    from pagemill.trace_export import Export
    from pagemill.tracing import Tracer

SpanOutcome = Literal["exported", "failed", "dropped"]
OnSpans = Callable[[SpanOutcome, int], None]

# an end waits for the last spans as long as that
STOP_S = 2.0

# of this process: there is one tracer provider
_export: "Export | None" = None


def tracer_for(wanted: bool) -> "Tracer | None":
    """
    What makes a program's spans; None where traces are off.

    Raises:
        SettingsError: they are on, and OpenTelemetry is not installed.
    """
    if not wanted:
        return None
    try:
        from pagemill.tracing import Tracer
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return Tracer()


def start(wanted: bool, service: str, *, instance: str = "", on_spans: OnSpans | None = None) -> "Tracer | None":
    """
    Have this program's spans exported until `stop`, as the OTEL_* variables say; gives what makes them.

    Args:
        service: Its name, where the environment says no other.
        instance: Tells processes of one service apart.
        on_spans: Told what became of spans, on any thread.

    Raises:
        SettingsError: traces are on and cannot be exported.
    """
    global _export
    if not wanted:
        return None
    try:
        from pagemill.trace_export import start_export
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    _export = start_export(service, instance=instance, on_spans=on_spans) or _export
    return tracer_for(wanted)


def stop(timeout_s: float = STOP_S) -> None:
    """Send what waits, for so long at most."""
    if _export is not None:
        _export.stop(timeout_s)


@contextmanager
def exported(
    wanted: bool, service: str, *, instance: str = "", on_spans: OnSpans | None = None
) -> "Iterator[Tracer | None]":
    """As `start`, while the context is open."""
    tracer = start(wanted, service, instance=instance, on_spans=on_spans)
    try:
        yield tracer
    finally:
        stop()


def _missing(error: ModuleNotFoundError) -> SettingsError:
    remedy = "in the checkout, `pip install --editable '.[otel]'` brings it"
    return SettingsError(f"tracing is on and {error.name} is not installed: {remedy}")
