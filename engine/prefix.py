"""Names for full blocks of tokens, chained so that equal names mean equal histories."""

import hashlib
from collections.abc import Callable

import xxhash

from engine.request import Request, Sequence

HashFunction = Callable[[bytes], bytes]
_TOKEN_BYTES = 4
# what else the KV of a block depends on: (tag, value, ...), the tag says which kind
Extras = tuple[tuple[str | int, ...], ...]


def xxh3_128(data: bytes) -> bytes:
    """Hash fast; a tenant who may choose tokens freely could construct a collision."""
    return xxhash.xxh3_128_digest(data)


def blake2b_128(data: bytes) -> bytes:
    """Hash so that nobody can construct a collision, at two to three times the cost."""
    return hashlib.blake2b(data, digest_size=16).digest()


def block_hash(parent: bytes, tokens: bytes, extras: Extras = (), *, hash_function: HashFunction) -> bytes:
    """
    Name a block by all that its KV depends on.

    Args:
        parent: Name of the block before it, or `root_hash`.
        tokens: Its token ids, int32 end to end.
        extras: What applies from this block on, such as an image within it.
    """
    return hash_function(parent + tokens + _encode(extras) if extras else parent + tokens)


def root_hash(request: Request, *, hash_function: HashFunction) -> bytes:
    """Name the empty prefix of a request: requests that must not share blocks differ here."""
    extras: Extras = () if request.cache_salt is None else (("salt", request.cache_salt),)
    return hash_function(_encode(extras))


class PrefixHasher:
    """
    Keeps the block hashes of sequences in step with their known tokens.

    Args:
        block_size: Tokens of a block.
        hash_function: `xxh3_128`, or `blake2b_128` where tenants who do not trust each other share the cache.
    """

    def __init__(self, *, block_size: int, hash_function: HashFunction = xxh3_128) -> None:
        self.block_size = block_size
        self.hash_function = hash_function

    def extend(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """
        Return the hashes of the sequence's full blocks, at least the first `num_blocks`.

        Raises:
            IndexError: when those blocks hold tokens that are not known yet.
        """
        hashes = sequence.block_hashes
        first = len(hashes)
        if first >= num_blocks:
            return hashes
        size = self.block_size
        parent = hashes[-1] if hashes else root_hash(sequence.request, hash_function=self.hash_function)
        tokens = sequence.token_ids(first * size, num_blocks * size).tobytes()
        for start in range(0, len(tokens), _TOKEN_BYTES * size):
            block = tokens[start : start + _TOKEN_BYTES * size]
            parent = block_hash(parent, block, hash_function=self.hash_function)
            hashes.append(parent)
        return hashes


def _encode(extras: Extras) -> bytes:
    # every part carries its type and its length, so that no two extras have one encoding
    parts: list[bytes] = []
    for extra in extras:
        parts.append(b"(%d" % len(extra))
        for part in extra:
            raw = str(part).encode("utf-8", "surrogatepass")
            parts.append(b"%c%d:" % (b"i" if isinstance(part, int) else b"s", len(raw)))
            parts.append(raw)
    return b"".join(parts)
