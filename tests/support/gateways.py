"""A gateway for tests: in this process on a thread of its own, on a free port, at a real server."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from pagemill.settings import ClientSettings
from producers.gateway.api_keys import entry, new_key
from producers.gateway.app import create_app
from producers.gateway.settings import GatewaySettings
from producers.gateway.state import Gateway
from tests.support.servers import wait_for


class RunningGateway:
    """What a test needs to know of one."""

    def __init__(self, app: Any, port: int) -> None:
        self._app = app
        self.url = f"http://127.0.0.1:{port}"

    @property
    def gateway(self) -> Gateway:
        found: Gateway = self._app.state.gateway
        return found


@contextlib.contextmanager
def running_gateway(
    redis_url: str, queue: str, *, object_store: str | None = None, **settings: Any
) -> Iterator[RunningGateway]:
    """Serves until the context is left; without a keys_file it serves anybody."""
    if "keys_file" not in settings:
        settings["no_auth"] = True
    place = ClientSettings.load(strict=False, redis_url=redis_url, queue=queue, object_store=object_store)
    app = create_app(GatewaySettings.load(grace_s=5, **settings), place)
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    socket = config.bind_socket()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive(), 20)
        assert server.started
        yield RunningGateway(app, socket.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(20)
        socket.close()
        assert not thread.is_alive()


def write_keys(path: Path, **limits: dict[str, int]) -> dict[str, str]:
    """A file of keys, by name with their limits; the keys themselves by name."""
    keys = {name: new_key() for name in limits}
    path.write_text("\n\n".join(entry(name, keys[name], limits=limits[name]) for name in keys))
    return keys
