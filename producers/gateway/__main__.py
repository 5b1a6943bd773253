"""
Runs the gateway until SIGTERM, and makes API keys.

    python -m producers.gateway --keys-file keys.toml --port 8000
    python -m producers.gateway keys create --name alice --requests-per-minute 60
"""

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from pagemill.errors import PagemillError, SettingsError
from pagemill.settings import ClientSettings, LogSettings
from pagemill.traces import exported
from producers.extras import need
from producers.gateway import api_keys
from producers.gateway.settings import GatewaySettings

_MODULES = ("fastapi", "jinja2", "prometheus_client", "python_multipart", "structlog", "uvicorn", "zstandard")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["keys"]:
            return create_key(given[1:])
        return serve(given)
    except PagemillError as error:
        print(f"pagemill gateway: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 0


def create_key(arguments: Sequence[str]) -> int:
    """Print a new key, once, and the lines that belong into the file of keys."""
    parser = argparse.ArgumentParser(prog="pagemill gateway keys")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    create = verbs.add_parser("create", help="make a key")
    create.add_argument("--name", required=True, help="what the file of keys calls it")
    create.add_argument("--tenant", help="who pays in the queue; the name, if not given")
    for limit in _LIMITS:
        create.add_argument(
            f"--{limit.replace('_', '-')}", type=int, help=f"most {limit.replace('_', ' ')}; unset: no limit"
        )
    create.add_argument("--operator", action="store_true", help="it may look at the status page, of all tenants")
    given = parser.parse_args(arguments)
    key = api_keys.new_key()
    limits = {limit: getattr(given, limit) for limit in _LIMITS}
    lines = api_keys.entry(given.name, key, tenant=given.tenant, limits=limits, operator=given.operator)
    print(f"The key, which is shown this once:\n\n    {key}\n\nFor the file of keys:\n", file=sys.stderr, flush=True)
    print(lines)
    return 0


def serve(arguments: Sequence[str]) -> int:
    """
    Listen until SIGTERM or Ctrl-C; running requests may then go on for `grace_s`.

    Raises:
        KeyboardInterrupt: it was told to end, and has ended in order.
    """
    given = vars(_parser().parse_args(arguments))
    place = {name: given.pop(name) for name in ("redis_url", "queue", "object_store")}
    settings = GatewaySettings.load(**given)
    queue = ClientSettings.load(strict=False, **place)
    need("gateway", *_MODULES)
    # uvicorn ends in order and then raises the signal anew: SIGTERM's own way would take us away with our last spans
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # a quarter of a second of imports that `keys` and `--help` need not pay, and that may be missing
    import structlog
    import uvicorn

    from pagemill.logs import configure_logging
    from producers.gateway.app import create_app, spans_of

    configure_logging(LogSettings.load(strict=False), libraries=logging.INFO, queue=queue.queue)
    app = create_app(settings, queue)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=max(1, round(settings.grace_s)),
    )
    try:
        listener = config.bind_socket()
    except SystemExit:
        # uvicorn has logged why, without the address
        why = f"cannot listen at {settings.host}:{settings.port}: choose another --host or --port"
        raise SettingsError(why) from None
    host, port = listener.getsockname()[:2]
    structlog.get_logger(__name__).info("gateway.listening", url=f"http://{host}:{port}")
    name = f"{socket.gethostname()}-{os.getpid()}"
    with exported(queue.tracing, "pagemill-gateway", instance=name, on_spans=lambda *told: spans_of(app, *told)):
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagemill gateway",
        description="OpenAI's API in front of a queue. `pagemill gateway keys create --name NAME` makes an API key.",
        epilog="Each flag is also PAGEMILL_GATEWAY_<NAME>, or a line under [gateway] in pagemill.toml.",
    )
    parser.add_argument("--redis-url", help="the queue's server")
    parser.add_argument("--queue", help="its name there")
    parser.add_argument("--object-store", help="where files, large payloads and results are")
    for name, field in GatewaySettings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        about = field.description or ""
        default = field.get_default(call_default_factory=True)
        if default and field.annotation is not bool:
            about += f" (default: {default})"
        options: dict[str, Any] = {"help": about.replace("%", "%%"), "default": None}
        if field.annotation is bool:
            parser.add_argument(flag, action="store_const", const=True, **options)
        elif field.annotation == list[str]:
            parser.add_argument(flag, action="append", **options)
        else:
            parser.add_argument(flag, **options)
    return parser


if __name__ == "__main__":
    sys.exit(main())
