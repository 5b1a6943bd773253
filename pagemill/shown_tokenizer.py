"""The tokenizer.json that the workers of a queue show to its producers, who count tokens with it."""

import zlib
from hashlib import blake2b

from redis.asyncio import Redis

from pagemill.keys import QueueKeys
from pagemill.scripts import Call, load, run_async

# of the compressed JSON: the largest vocabularies of today have about 6 MiB
MAX_BYTES = 16 * 1024 * 1024

# producers that plan while the workers restart still find it
SHOWN_S = 600


class ShownTokenizer:
    """
    A worker's side: shows one tokenizer, and keeps it shown.

    It is sent once; later calls only prolong it, unless another worker has shown another one.
    """

    def __init__(self, redis: Redis, keys: QueueKeys) -> None:
        self._redis, self._keys = redis, keys

    async def show(self, packed: bytes) -> None:
        """
        Show what `pack` gave, for the next ten minutes.

        Raises:
            QueueUnavailable: the server cannot be reached, or has no room for it.
        """
        digest = blake2b(packed, digest_size=16).hexdigest()
        if not await run_async(self._redis, _show(self._keys, digest, b"")):
            await run_async(self._redis, _show(self._keys, digest, packed))


def pack(tokenizer_json: str) -> bytes | None:
    """The JSON as it is shown; None where it is too large for that."""
    packed = zlib.compress(tokenizer_json.encode())
    return packed if len(packed) <= MAX_BYTES else None


def unpack(packed: bytes) -> str:
    return zlib.decompress(packed).decode()


def _show(keys: QueueKeys, digest: str, packed: bytes) -> Call[bool]:
    return Call(load("tokenizer"), keys.base, [digest, SHOWN_S * 1000, packed], lambda reply: reply == 1)
