"""Jobs out of what a command line gives: a prompt, files, standard input, lines of JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pagemill.errors import InvalidJob
from pagemill.schema import Job


def prompt_fields(text: str, *, raw: bool, system: str | None) -> dict[str, Any]:
    """
    The input fields of a job: a chat of one turn, or the text as it stands.

    Raises:
        InvalidJob: the text is empty, or has a system message and no template that could hold it.
    """
    if not text:
        raise InvalidJob("empty_prompt", "the prompt is empty: give at least one character")
    if raw:
        if system is not None:
            raise InvalidJob("invalid_job", "--system needs a chat: leave out --raw")
        return {"prompt": text}
    turns = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*turns, {"role": "user", "content": text}]}


def read_assignments(pairs: Iterable[str], *, option: str) -> dict[str, str]:
    """
    NAME=VALUE pairs as a mapping.

    Raises:
        InvalidJob: a pair has no "=".
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidJob("invalid_job", f"{option} is {pair!r}; want NAME=VALUE")
        found[name] = value
    return found


def read_json_values(pairs: Mapping[str, str]) -> dict[str, Any]:
    """Values as JSON where they are JSON, as text where they are not: 3, true, [1, 2], hello."""
    values: dict[str, Any] = {}
    for name, text in pairs.items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def read_schema(text: str) -> Any:
    """
    A JSON schema that is given as itself, or as the file that holds it.

    Raises:
        InvalidJob: it is no JSON, or there is no such file.
    """
    is_file = not text.lstrip().startswith("{")
    try:
        return json.loads(Path(text).read_bytes() if is_file else text)
    except OSError as error:
        raise InvalidJob("invalid_job", f"--json-schema is {text!r}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidJob("invalid_grammar", f"--json-schema is no JSON: {error}") from None


def read_jsonl(lines: Iterable[bytes], defaults: Mapping[str, Any]) -> Iterator[tuple[int, Job | InvalidJob]]:
    """
    One job a line, with the fields of `pagemill.schema.Job`, beside the line's number from 1.

    A line's own fields, and its own options one by one, go before the defaults. Blank lines are
    skipped; a line that is no job gives the reason, and those after it are read all the same.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, _job_of(line, defaults)
        except InvalidJob as error:
            yield number, error


def _job_of(line: bytes, defaults: Mapping[str, Any]) -> Job:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidJob("invalid_encoding", f"not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise InvalidJob("invalid_job", f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidJob("invalid_job", "not a JSON object: want fields such as prompt and options")
    merged = {**defaults, **fields}
    if isinstance(fields.get("options", {}), dict):
        merged["options"] = {**defaults.get("options", {}), **fields.get("options", {})}
    job = Job.build(**merged)
    # what cannot be sent is this line's fault, and is to be told with its number
    job.payload()
    return job
