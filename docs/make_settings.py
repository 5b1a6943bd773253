"""
Writes docs/settings.md from the models of the settings.

    python -m docs.make_settings

The page is made by this and nothing else; with --check it says whether it is not. What a setting means stands at its
field.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pagemill.settings import PREFIX, ClientSettings, LogSettings
from producers.batch_file.__main__ import command_line as batch_line
from producers.bulk.__main__ import command_line as bulk_line
from producers.bulk.spec import BulkSpec, MapReduce
from producers.gateway.settings import GatewaySettings
from producers.tasks.settings import CelerySettings
from worker.settings import MetricsSettings, WorkerSettings

PAGE = Path(__file__).with_name("settings.md")

HEAD = """\
<!-- made by `python -m docs.make_settings`: change the fields of the settings, or that -->
# Settings

All settings of all programs. Each program's own page has those that matter first, with the reasons.

A setting is a flag, or a variable of the environment, or a line of a TOML file, in this order of precedence. The file
is `./pagemill.toml`, or what `PAGEMILL_CONFIG` names; the setting `drain_s` is the line `drain_s = 60` there. Settings
of the gateway stand in its table `[gateway]`, bulk jobs in tables `[bulk.<name>]`.

- **A name that no setting has is an error**, with the nearest one that there is: a misspelt setting would silently
  leave the default. One file and one environment may serve all programs. Clients, whose environment is often that of a
  service, refuse only what is nearly one of their own.
- Names that end in `_s` are in seconds, those in `_tokens` in tokens. Sizes take a number of bytes, or a unit: `2GiB`,
  `512MB`.
- A switch is `true` or `false` in the environment and the file. Its flag is `--name`, and `--no-name` where it is on.
- `unset` says what happens where nothing is given.

| variable | |
|---|---|
| `PAGEMILL_CONFIG` | the file of settings, in place of `./pagemill.toml`; it must be there |
| `PAGEMILL_CACHE` | the folder of pulled models, in place of `~/.cache/pagemill` |

What libraries read is theirs, as `AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL_S3` for the object store, `HF_TOKEN` for the
hub, `CUDA_VISIBLE_DEVICES`.
"""

CLIENT = """\
## All programs

Clients, `pagemill submit` and its like, workers, gateways, bulk jobs and the tasks for Celery. Flags stand before a
client's command, as in `pagemill --queue nightly status`.
"""

LOGS = """\
## Logs

Of all programs that run for long, and of bulk jobs and batch files; flags of workers and the exporter alone.
[observability.md](observability.md) shows the lines.
"""

METRICS = """\
## Metrics

Of workers, and of `python -m worker.exporter`, which has `redis_url` and `queue` too and serves at port 9464 where
none is set. [metrics.md](metrics.md) has what is served.
"""

WORKER = """\
## The worker

`pagemill worker`: besides those of all programs and of metrics.
"""

GATEWAY = """\
## The gateway

`pagemill gateway`; [gateway.md](gateway.md). A list has commas between its members in the environment; its flag is
repeated.
"""

CELERY = """\
## Tasks for Celery

The ingress, the completer and the beat; they have no flags. [celery.md](celery.md). A list is JSON in the environment.
"""

BULK = """\
## Bulk jobs

A table `[bulk.<name>]` of the file, or a file for `--config`, or flags of `pagemill bulk run`; no variables.
[bulk.md](bulk.md). What a template takes is `--param NAME=VALUE`, an option `--option NAME=VALUE`.
"""

# where a part of a model begins: fields that are added later fall into the part in which they are declared
WORKER_PARTS = {
    "lease_s": "Jobs and the queue",
    "engine": "The engine",
    "fake_tokens_per_s": "The fake engine",
    "supervisor": "The process",
}


def page() -> str:
    """The whole text."""
    client, metrics, logs = (set(model.model_fields) for model in (ClientSettings, MetricsSettings, LogSettings))
    own = [name for name in WorkerSettings.model_fields if name not in client | metrics]
    parts = [
        HEAD,
        CLIENT,
        _settings_table(ClientSettings, client, flags={"redis_url", "queue", "object_store"}),
        LOGS,
        _settings_table(LogSettings, logs),
        METRICS,
        _settings_table(MetricsSettings, metrics - client - logs),
        WORKER,
        *_worker_tables([name for name in own if not _is_internal(name)]),
        GATEWAY,
        _settings_table(GatewaySettings, GatewaySettings.model_fields, prefix=f"{PREFIX}GATEWAY_", no_flags=False),
        CELERY,
        _settings_table(CelerySettings, CelerySettings.model_fields.keys() - client, flags=()),
        BULK,
        _spec_table(BulkSpec, _flags_of(_verb(bulk_line(), "run"))),
        "### Long documents\n\nThe table `map_reduce` of a bulk job.\n",
        _spec_table(MapReduce, set()),
        "## Batch files\n\nFlags alone; [batches.md](batches.md).\n",
        "### `pagemill batch run`\n",
        _argument_table(_verb(batch_line(), "run")),
        "### `python -m producers.batch_file serve`\n\nRuns the batches of gateways that run none themselves "
        "(`max_batches` 0).\n",
        _argument_table(_verb(batch_line(), "serve")),
    ]
    return "\n".join(parts)


def _is_internal(name: str) -> bool:
    """What a supervisor alone tells the worker that it starts."""
    return name == "supervised"


def _worker_tables(names: list[str]) -> Iterator[str]:
    starts = [names.index(first) for first in WORKER_PARTS]
    for title, start, end in zip(WORKER_PARTS.values(), starts, [*starts[1:], len(names)], strict=True):
        yield f"### {title}\n"
        yield _settings_table(WorkerSettings, names[start:end])


def _settings_table(
    model: type[BaseModel],
    names: Iterable[str],
    *,
    prefix: str = PREFIX,
    flags: Iterable[str] | None = None,
    no_flags: bool = True,
) -> str:
    """
    Fields of a model in its order.

    Args:
        flags: Those that are flags too; None for all.
        no_flags: Switches that are on have a flag that turns them off.
    """
    wanted, with_flag = set(names), None if flags is None else set(flags)
    rows = []
    for name, schema in _properties(model).items():
        if name in wanted:
            has_flag = with_flag is None or name in with_flag
            flag = _flag(name, turned_off=no_flags and schema.get("default") is True) if has_flag else ""
            row = (f"`{name}`", flag, f"`{prefix}{name.upper()}`", *_facts(schema))
            rows.append(row)
    return _table(("setting", "flag", "variable", "default", "values", "meaning"), rows)


def _flag(name: str, *, turned_off: bool) -> str:
    return f"`--{'no-' if turned_off else ''}{name.replace('_', '-')}`"


def _spec_table(model: type[BaseModel], flags: set[str]) -> str:
    rows = []
    for name, schema in _properties(model).items():
        flag = _flag(name, turned_off=False)
        rows.append((f"`{name}`", flag if flag.strip("`") in flags else "", *_facts(schema)))
    return _table(("field", "flag", "default", "values", "meaning"), rows)


def _argument_table(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if "--help" not in action.option_strings and action.dest not in ClientSettings.model_fields:
            name = ", ".join(f"`{one}`" for one in action.option_strings) or f"`{action.dest.upper()}`"
            values = ", ".join(f"`{one}`" for one in action.choices or ())
            rows.append((name, values, (action.help or "").rstrip(".") + "."))
    return _table(("argument", "values", "meaning"), rows)


def _verb(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found: argparse.ArgumentParser = verbs.choices[name]
    return found


def _flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings} | {"--param", "--option"}


def _properties(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each field, by its name; where it needs one, that is marked."""
    schema = model.model_json_schema(by_alias=False)
    required = schema.get("required", ())
    return {name: {"required": name in required, **found} for name, found in schema["properties"].items()}


def _facts(schema: Mapping[str, Any]) -> tuple[str, str, str]:
    """Default, values and meaning."""
    return _default(schema), _values(schema), schema["description"]


def _default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    if schema["required"]:
        return "needed"
    if "$ref" in schema:
        return "its own"
    if isinstance(value, list) or schema.get("type") in ("array", "object"):
        return "none"
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if _is_size(schema):
        return _size(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _size(value: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if value % 1024 or not value:
            return f"{value} {unit}"
        value //= 1024
    return f"{value} GiB"


def _is_size(schema: Mapping[str, Any]) -> bool:
    return any("w+" in one.get("pattern", "") for one in schema.get("anyOf", ()))


def _values(schema: Mapping[str, Any]) -> str:
    """What may be given."""
    if _is_size(schema):
        return "a size"
    (of,) = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    if "enum" in of:
        return ", ".join(f"`{one}`" for one in of["enum"])
    kinds = {"boolean": "a switch", "array": "a list", "object": "a table", "integer": "whole number"}
    kind = "a table" if "$ref" in of else kinds.get(of.get("type", ""), of.get("type", ""))
    text = {"password": "a secret", "path": "a path", "date-time": "a time with its zone"}
    kind = text.get(of.get("format", ""), "a name" if "pattern" in of else "text") if kind == "string" else kind
    return " ".join([kind, *_bounds(of)])


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    if "exclusiveMinimum" in schema:
        yield f"above {schema['exclusiveMinimum']:g}"
    if "minimum" in schema:
        yield f"from {schema['minimum']:g}" if schema["minimum"] < 1e6 else f"from {schema['minimum']}"
    if "maximum" in schema:
        yield f"to {schema['maximum']}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.make_settings", description="Write docs/settings.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is another one")
    options = parser.parse_args()
    made = page()
    if options.check:
        changed = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made
        print(*[f"{PAGE.name} is not what `python -m docs.make_settings` writes"] * changed)
        return int(changed)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
