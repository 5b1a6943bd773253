"""
The process beside a gateway that runs its batches, started again whenever it ends.

Batches are plain blocking work that parses and writes JSON all the time: on a thread of the gateway it
would take the interpreter from the event loop, and so from all streams.
"""

import asyncio
import os
import sys

import structlog

from pagemill.settings import ClientSettings
from producers.child import Child
from producers.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

LOOK_S = 1.0

# one that dies at once is not started again at once
PAUSE_S = 5.0


class BatchProcess:
    """
    Entered on the event loop's own thread, as Linux ends a child with the thread that started it.

    What the child needs to know goes by its environment: a password may be in the server's URL.
    """

    def __init__(self, queue: ClientSettings, settings: GatewaySettings) -> None:
        self._command = [
            *(sys.executable, "-P", "-m", "producers.batch_file", "serve"),
            *("--batches", str(settings.max_batches)),
            *("--max-mb", str(max(1, settings.max_file_bytes // 1024**2))),
            *("--ttl-s", str(settings.file_ttl_s)),
        ]
        given = {
            "REDIS_URL": queue.redis_url,
            "QUEUE": queue.queue,
            "OBJECT_STORE": queue.object_store or "",
            "MAX_QUEUED_TOKENS": str(queue.max_queued_tokens),
        }
        self._environ = os.environ | {f"PAGEMILL_{name}": value for name, value in given.items()}

    async def run(self) -> None:
        """Until it is cancelled, when no request runs any more: the child has time then to hand its batches over."""
        while True:
            with Child(self._command, log=None, environ=self._environ) as child:
                while (code := child.exit_code()) is None:
                    await asyncio.sleep(LOOK_S)
            log.error("batches.process_ended", code=code, restart_s=PAUSE_S)
            await asyncio.sleep(PAUSE_S)
