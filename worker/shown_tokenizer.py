"""Shows the model's tokenizer to the queue's producers: bulk runs split long documents with it."""

import asyncio

import structlog

from pagemill.consumer import Consumer
from pagemill.errors import QueueUnavailable
from pagemill.shown_tokenizer import MAX_BYTES, SHOWN_S, pack
from worker.engine_port import Tokenizer

log = structlog.get_logger(__name__)


async def show_forever(consumer: Consumer, tokenizer: Tokenizer, every_s: float = SHOWN_S / 10) -> None:
    """Keep the tokenizer shown; one that is too large is not, and producers then estimate."""
    packed = await asyncio.to_thread(lambda: pack(tokenizer.to_json()))
    if packed is None:
        log.warning("tokenizer.not_shown", reason=f"compressed it has more than {MAX_BYTES:,} bytes")
        return
    while True:
        try:
            await consumer.tokenizer.show(packed)
        except QueueUnavailable as error:
            log.warning("tokenizer.not_shown", reason=str(error))
        await asyncio.sleep(every_s)
