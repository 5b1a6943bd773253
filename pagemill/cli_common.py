"""What the groups of commands share: the client they talk through, and JSON."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pagemill.client import Client

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def open_client(context: typer.Context) -> "Client":
    """A client of what the options before the command say; to be closed by the caller."""
    # not before a command needs it: `pagemill --help` stays quick
    from pagemill.client import Client

    return Client(context.obj["redis_url"], queue=context.obj["queue"], object_store=context.obj["object_store"])


def to_json(value: Any) -> str:
    """A dataclass as one line."""
    return json.dumps(asdict(value))
