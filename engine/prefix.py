"""Names for full blocks of tokens, chained so that equal names mean equal histories."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from engine.request import Request, Sequence, TokenIds

HashFunction = Callable[[bytes], bytes]
_TOKEN_BYTES = 4
# blocks that are worth a look-up: one that finds nothing, with what is kept then, costs as much as a dozen hashes
MIN_RUN = 32
# tokens that are remembered: 4 MB with the names of their blocks, of 16 tokens each
MAX_RUN_TOKENS = 1 << 19
# what else the KV of all blocks depends on: (tag, value, ...), the tag says which kind
Extras = tuple[tuple[str | int, ...], ...]


def xxh3_128(data: bytes) -> bytes:
    """Hash fast; a tenant who may choose tokens freely could construct a collision."""
    return xxhash.xxh3_128_digest(data)


def blake2b_128(data: bytes) -> bytes:
    """Hash so that nobody can construct a collision, at two to three times the cost."""
    return hashlib.blake2b(data, digest_size=16).digest()


def block_names(parent: bytes, tokens: TokenIds, *, block_size: int, hash_function: HashFunction) -> list[bytes]:
    """
    Name full blocks, each by its tokens and the name before it: by all that its KV depends on.

    Args:
        parent: Name of the block before the first, or `root_hash`.
        tokens: Of the blocks, end to end.
    """
    data, step = tokens.tobytes(), _TOKEN_BYTES * block_size
    names = []
    for start in range(0, len(data), step):
        parent = hash_function(parent + data[start : start + step])
        names.append(parent)
    return names


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
        self._runs = _Runs(block_size)

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
        tokens = sequence.token_ids(first * size, num_blocks * size)
        while len(tokens) >= MIN_RUN * size:
            known = self._runs.find(parent, tokens)
            if not known:
                names = self._names(parent, tokens)
                self._runs.keep(parent, tokens, names)
                hashes += names
                return hashes
            hashes += known
            parent, tokens = known[-1], tokens[len(known) * size :]
        hashes += self._names(parent, tokens)
        return hashes

    def _names(self, parent: bytes, tokens: TokenIds) -> list[bytes]:
        return block_names(parent, tokens, block_size=self.block_size, hash_function=self.hash_function)


class _Run(NamedTuple):
    """Blocks that follow each other, and their names."""

    tokens: TokenIds
    names: list[bytes]


class _Runs:
    """
    Remembers what blocks were named not long ago, so that those of a shared prefix are not hashed for each prompt.

    A run is found by the name before it and the tokens of its first block, and goes as far as its tokens are those
    that are asked for: nothing rests on a hash. Where a prompt leaves a run, the rest of it is a run of its own, if
    it is worth one, so that prompts are found in pieces, however they share their beginnings.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # the least recently used first
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()
        self._num_tokens = 0

    def find(self, parent: bytes, tokens: TokenIds) -> list[bytes]:
        """The names of the leading blocks of some tokens, as far as they are known."""
        key = self._key(parent, tokens)
        run = self._runs.get(key)
        if run is None:
            return []
        self._runs.move_to_end(key)
        shorter = min(len(tokens), len(run.tokens))
        differs = tokens[:shorter] != run.tokens[:shorter]
        first = int(differs.argmax())
        return run.names[: (first if differs[first] else shorter) // self._block_size]

    def keep(self, parent: bytes, tokens: TokenIds, names: list[bytes]) -> None:
        """Remember a run of which `find` knew nothing, unless it would leave room for no other."""
        if len(tokens) > MAX_RUN_TOKENS:
            return
        # a copy, as these may be the end of something larger
        self._runs[self._key(parent, tokens)] = _Run(tokens.copy(), names)
        self._num_tokens += len(tokens)
        while self._num_tokens > MAX_RUN_TOKENS:
            _, oldest = self._runs.popitem(last=False)
            self._num_tokens -= len(oldest.tokens)

    def _key(self, parent: bytes, tokens: TokenIds) -> bytes:
        return parent + tokens[: self._block_size].tobytes()


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
