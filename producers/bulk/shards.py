"""Write the output of each chunk as one object that never changes, and find those that are there."""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from pagemill.errors import ObjectExists
from pagemill.object_store import ObjectStore
from pagemill.objects import ObjectEntry
from producers.bulk.decoders import digest_of, read_rows
from producers.bulk.encoders import Digester, Encoder, ShardFormat, open_encoder
from producers.bulk.rows import OutputRow, RowUsage

Kind = Literal["part", "errors"]


class Shard(BaseModel):
    """
    One finished output object.

    Args:
        index: Of its chunk.
        name: Inside the output's store: `part-000001.jsonl.zst`.
        num_failed: Rows that are not done.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    name: str
    url: str
    sha256: str
    size_bytes: int
    num_rows: int
    num_failed: int
    usage: RowUsage


def shard_name(index: int, format: ShardFormat = "jsonl.zst", kind: Kind = "part") -> str:  # noqa: A002
    """The name of a chunk's output: of its number alone, so that whoever does it again writes the same object."""
    return f"{kind}-{index:06d}.{format}"


def write_shard(
    store: ObjectStore,
    index: int,
    rows: Iterable[OutputRow],
    *,
    format: ShardFormat = "jsonl.zst",  # noqa: A002
    errors: bool = False,
    replace: bool = False,
) -> Shard:
    """
    Write a chunk's rows, in their order, in bounded memory; nothing is visible before the last one is safe.

    The first who writes it wins: where the shard is there already, that one stays and is described.

    Args:
        store: The output's folder.
        errors: Write the rows that are not done into `errors-<index>` too, if there is any; it is there before the
            shard is.
        replace: Write over a shard that is there, as when failed rows are run again.

    Raises:
        ObjectStoreError: it cannot be written.
    """
    name = shard_name(index, format)
    totals = _Totals()
    try:
        with store.open_writer(name, if_absent=not replace) as writer, ExitStack() as stack:
            file = Digester(writer)
            part = stack.enter_context(open_encoder(file, format))
            failed = stack.enter_context(_Failed(store, index, format)) if errors else None
            for row in rows:
                part.write(row)
                totals.add(row)
                if failed is not None:
                    failed.write(row)
        shard = totals.shard(index, name, writer.url, file.sha256, file.size_bytes)
    except ObjectExists:
        if errors:
            # ours may have taken the place of those that belong to the shard that stays
            with _Failed(store, index, format) as failed:
                for row in read_rows(store, store.url(name), format):
                    failed.write(row)
        shard = read_shard(store, index, format)
    if errors and not shard.num_failed:
        # not before: until then they told of rows of the shard that was replaced
        store.delete(store.url(shard_name(index, format, "errors")))
    return shard


def read_shard(store: ObjectStore, index: int, format: ShardFormat = "jsonl.zst") -> Shard:  # noqa: A002
    """
    Describe a shard that is there, by reading all of it.

    Raises:
        ObjectNotFound: it is not there.
        OutputError: it is no shard of that format.
    """
    name = shard_name(index, format)
    url = store.url(name)
    stat = store.stat(url)
    totals = _Totals()
    for row in read_rows(store, url, format, stat):
        totals.add(row)
    return totals.shard(index, name, url, digest_of(store, url, stat), stat.size)


def list_shards(
    store: ObjectStore,
    format: ShardFormat = "jsonl.zst",  # noqa: A002
    kind: Kind = "part",
) -> Iterator[tuple[int, ObjectEntry]]:
    """The finished shards by their chunks' numbers, in no promised order; nothing of them is read."""
    pattern = re.compile(rf"{kind}-(\d{{6,}})\.{re.escape(format)}")
    for entry in store.list(f"{kind}-"):
        if found := pattern.fullmatch(entry.name):
            yield int(found[1]), entry


class _Failed:
    """The rows that are not done, in an object of their own that is begun with the first of them."""

    def __init__(self, store: ObjectStore, index: int, format: ShardFormat) -> None:  # noqa: A002
        self._store = store
        self._name = shard_name(index, format, "errors")
        self._format = format
        self._stack = ExitStack()
        self._encoder: Encoder | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def write(self, row: OutputRow) -> None:
        """Take the row if it is one of them."""
        if row.status == "done":
            return
        if self._encoder is None:
            writer = self._stack.enter_context(self._store.open_writer(self._name))
            self._encoder = self._stack.enter_context(open_encoder(Digester(writer), self._format))
        self._encoder.write(row)


class _Totals:
    """What the rows of a shard add up to."""

    def __init__(self) -> None:
        self._num_rows = self._num_failed = 0
        self._prompt = self._completion = self._cached = 0

    def add(self, row: OutputRow) -> None:
        self._num_rows += 1
        self._num_failed += row.status != "done"
        self._prompt += row.usage.prompt_tokens
        self._completion += row.usage.completion_tokens
        self._cached += row.usage.cached_tokens

    def shard(self, index: int, name: str, url: str, digest: str, size_bytes: int) -> Shard:
        usage = RowUsage(prompt_tokens=self._prompt, completion_tokens=self._completion, cached_tokens=self._cached)
        return Shard(
            index=index,
            name=name,
            url=url,
            sha256=digest,
            size_bytes=size_bytes,
            num_rows=self._num_rows,
            num_failed=self._num_failed,
            usage=usage,
        )
