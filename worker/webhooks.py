"""
Tells the receivers that batches have ended: signed, at least once, retried.

A message is a POST of JSON with the headers of Standard Webhooks: webhook-id, the same in every
try; webhook-timestamp; webhook-signature, `v1,` and the base64 of HMAC-SHA256 over
"<id>.<timestamp>.<body>". Its receiver answers with 2xx, and may hear of an end twice.

Source: https://www.standardwebhooks.com, specification 1.0.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import structlog

from pagemill.consumer import Consumer
from pagemill.errors import QueueUnavailable, SettingsError
from pagemill.messages import BatchStatus, HookDelivery
from worker.safe_post import AddressRefused, BadAnswer, post

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_IN_FLIGHT = 8
TIMEOUT_S = 10.0
# a webhook that nobody settles for so long is due again: its deliverer is gone
HOLD_MS = 60_000
FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 3600.0
# for a worker that cannot sign: another one may sweep by then
NO_SECRET_MS = 60_000
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64
# fields of a batch that its receiver gets
TOLD = (
    *("batch_id", "queue", "tenant", "total", "done", "failed", "cancelled", "expired", "cancel_requested"),
    *("prompt_tokens", "completion_tokens", "gpu_ms", "created_ms", "ended_ms", "metadata"),
)
# the receiver says that it wants no more of them
GONE = 410


class Webhooks:
    """
    Delivers what is due, each on a thread of its own.

    Args:
        secret: What messages are signed with; without one none is delivered.
        allow_private: Deliver also to addresses that are not of the internet.
    """

    def __init__(self, consumer: Consumer, *, secret: bytes | None, allow_private: bool = False) -> None:
        self._consumer = consumer
        self._secret = secret
        self._allow_private = allow_private
        self._deliveries: set[asyncio.Task[None]] = set()

    async def deliver_due(self) -> None:
        """
        Begin the deliveries that are due; does not wait for their end.

        Raises:
            QueueUnavailable: the server cannot be asked.
        """
        room = MAX_IN_FLIGHT - len(self._deliveries)
        if room <= 0:
            return
        for batch in await self._consumer.take_hooks(room, hold_ms=HOLD_MS):
            task = asyncio.create_task(self._deliver(batch))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    def close(self) -> None:
        """Give up what is under way; it is due again when its time is over."""
        for task in self._deliveries:
            task.cancel()

    async def _deliver(self, batch: BatchStatus) -> None:
        if self._secret is None:
            delivery = HookDelivery("again", NO_SECRET_MS, "the worker that sweeps has no webhook_secret")
        else:
            secret = self._secret
            delivery = await on_a_thread(lambda: try_once(batch, secret, allow_private=self._allow_private))
        try:
            state = await self._consumer.settle_hook(batch.batch_id, delivery)
        except QueueUnavailable as error:
            log.warning("webhook.not_settled", batch_id=batch.batch_id, error=str(error))
            return
        note = log.info if state in ("delivered", "") else log.warning
        note("webhook.tried", batch_id=batch.batch_id, state=state, tries=batch.webhook_tries, why=delivery.why)


def try_once(batch: BatchStatus, secret: bytes, *, allow_private: bool, **options: Any) -> HookDelivery:
    """
    Send a batch's message, and judge what came of it; blocking, and raises nothing.
    """
    body = message_of(batch)
    try:
        headers = signed_headers(f"msg_{batch.batch_id}", int(time.time()), body, secret)
        status = post(batch.webhook, body, headers, timeout_s=TIMEOUT_S, allow_private=allow_private, **options)
    except (BadAnswer, OSError) as error:
        # before ValueError: a certificate that is not valid is both, and may be renewed
        return HookDelivery("again", backoff_ms(batch.webhook_tries), f"{type(error).__name__}: {error}")
    except (AddressRefused, ValueError) as error:
        # no later try would be allowed
        return HookDelivery("failed", why=str(error))
    except Exception as error:
        # a fault of ours, met on one batch's data: the others are delivered
        log.exception("webhook.not_sent", batch_id=batch.batch_id)
        return HookDelivery("again", backoff_ms(batch.webhook_tries), f"{type(error).__name__}: {error}")
    if 200 <= status < 300:
        return HookDelivery("delivered")
    why = f"the receiver answered {status}" + ("; redirects are not followed" if 300 <= status < 400 else "")
    if status == GONE:
        return HookDelivery("failed", why=why)
    return HookDelivery("again", backoff_ms(batch.webhook_tries), why)


def backoff_ms(tries: int) -> int:
    """A pause that doubles with each try, up to an hour, and whose second half is drawn."""
    most_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 32))
    return round(1000 * most_s * random.uniform(0.5, 1.0))


def message_of(batch: BatchStatus) -> bytes:
    """What the receiver gets: the same bytes in every try."""
    message = {
        "type": "batch.ended",
        "timestamp": datetime.fromtimestamp(batch.ended_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        "data": {name: getattr(batch, name) for name in TOLD},
    }
    return json.dumps(message, separators=(",", ":")).encode()


def signed_headers(message_id: str, timestamp: int, body: bytes, secret: bytes) -> dict[str, str]:
    """The headers of a message, its signature among them."""
    digest = hmac.digest(secret, b"%b.%d.%b" % (message_id.encode(), timestamp, body), hashlib.sha256)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
        "Content-Type": "application/json",
        "User-Agent": "pagemill-webhooks/1",
    }


def read_secret(text: str) -> bytes:
    """
    The key in a secret of Standard Webhooks, `whsec_` and base64.

    Raises:
        SettingsError: it is none; the message does not tell what it is.
    """
    prefix, _, coded = text.partition("whsec_")
    try:
        key = base64.b64decode(coded, validate=True)
    except binascii.Error:
        key = b""
    if prefix or not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        wanted = f"whsec_ and the base64 of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} random bytes"
        raise SettingsError(f"webhook_secret is not {wanted}: make one with `openssl rand -base64 32`")
    return key


async def on_a_thread(action: Callable[[], T]) -> T:
    """
    Run a blocking action that raises nothing, on a thread that does not hold up the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def run() -> None:
        result = action()
        # the loop may have been closed meanwhile
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="webhook", daemon=True).start()
    return await future
