"""What the groups of commands share: the client they talk through, JSON, and the start of other programs."""

import atexit
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pagemill import traces

if TYPE_CHECKING:
    from pagemill.client import Client

# what follows these commands is for the program that they start, --help too
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def open_client(context: typer.Context) -> "Client":
    """A client of what the options before the command say; to be closed by the caller."""
    # not before a command needs it: `pagemill --help` stays quick
    from pagemill.client import Client

    client = Client(context.obj["redis_url"], queue=context.obj["queue"], object_store=context.obj["object_store"])
    if client.tracer is not None:
        traces.start(True, "pagemill-cli")
        atexit.register(traces.stop)
    return client


def to_json(value: Any) -> str:
    """A dataclass as one line."""
    return json.dumps(asdict(value))


def hand_down(context: typer.Context) -> None:
    """Leave what the options before the command say to the program that `become` starts."""
    # its own flags stand behind its own command
    named = {"PAGEMILL_REDIS_URL": "redis_url", "PAGEMILL_QUEUE": "queue", "PAGEMILL_OBJECT_STORE": "object_store"}
    os.environ.update({name: context.obj[option] for name, option in named.items() if context.obj[option]})


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process, so that signals and exit codes are the program's own."""
    path = Path(__file__).resolve().parent.parent.joinpath(*module.split("."))
    if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
        print(f"pagemill: there is no {module} here: run this from the checkout or the image", file=sys.stderr)
        sys.exit(1)
    # -P: a folder of that name where the user stands is not meant
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
