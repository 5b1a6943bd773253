"""
Versions of the wire format, and how two of them live in one queue.

A job says the version of the Pagemill that wrote it, in its JSON and in its hash (`v`; none is 1),
and its result is written in the same one: whoever could write the job can read the result. Readers
refuse fields that they do not know, so each addition makes a version.

    2   batch, reply_to, reply_context, traceparent and tracestate of a job; json_schema, regex and choice
        of its options; gpu_ms of a result's usage; the failure codes poison and invalid_grammar

A worker takes its own version and the one before. So workers are updated first, one after the other,
then the programs that submit. A job of a later version is left to a worker that knows it, as long as
one lives; where none does, it is put off for a while before it fails. Scripts are called by the hash
of their text: those of two versions do not meet.
"""

from collections.abc import Iterable

from pagemill.errors import InvalidJob, NewerVersion

SCHEMA_VERSION = 2

# what a job of an earlier version cannot have
JOB_FIELDS_SINCE = {
    "batch": 2,
    "reply_to": 2,
    "reply_context": 2,
    "traceparent": 2,
    "tracestate": 2,
    "options.json_schema": 2,
    "options.regex": 2,
    "options.choice": 2,
}

# from which version on a job has a trace context
TRACED_SINCE = JOB_FIELDS_SINCE["traceparent"]

# what a result of an earlier version says in place of a code that it does not know; that of poison is written in Lua
CODES_SINCE = {"invalid_grammar": (2, "invalid_job")}


def taken_by(version: int) -> frozenset[int]:
    """Versions of jobs that a worker of this version takes: its own and the one before."""
    return frozenset(range(max(1, version - 1), version + 1))


def check_version(version: int, taker: int) -> None:
    """
    Refuse a job whose version a worker of version `taker` does not take.

    Raises:
        NewerVersion: a later Pagemill does.
        InvalidJob: unsupported_version, where it is too old.
    """
    if version in taken_by(taker):
        return
    known = " and ".join(map(str, sorted(taken_by(taker))))
    message = f"the job has schema version {version}; this Pagemill takes {known}"
    if version > taker:
        raise NewerVersion(version, message)
    raise InvalidJob("unsupported_version", message)


def code_for(version: int, code: str) -> str:
    """The failure code that a reader of this version knows."""
    since, earlier = CODES_SINCE.get(code, (1, code))
    return code if version >= since else earlier


def check_fields(version: int, given: Iterable[str]) -> None:
    """
    Args:
        given: Names of fields; those inside another with its name before a dot.

    Raises:
        InvalidJob: a field came with a later version than the job's.
    """
    for name in given:
        since = JOB_FIELDS_SINCE.get(name, 1)
        if version < since:
            raise InvalidJob("invalid_job", f"{name}: came with version {since}, and the job says {version}")
