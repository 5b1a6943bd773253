"""What a finished bulk job has written: put there last, so that whoever sees it sees all of it."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from pagemill.errors import ObjectExists, ObjectNotFound
from pagemill.object_store import ObjectStore
from producers.bulk.decoders import digest_of
from producers.bulk.encoders import ShardFormat
from producers.bulk.io_errors import OutputError
from producers.bulk.rows import RowUsage
from producers.bulk.shards import Shard

MANIFEST_NAME = "manifest.json"


class Manifest(BaseModel):
    """
    All of an output.

    Args:
        source_fingerprint: `Source.fingerprint` of what was planned.
        config_fingerprint: Names everything else that the answers hang on: model, template, options.
        num_failed: Rows that are not done.
        details: Anything of the job that readers may want, as JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    source: str
    source_fingerprint: str
    config_fingerprint: str
    format: ShardFormat
    started_at: datetime
    ended_at: datetime
    shards: tuple[Shard, ...]
    num_rows: int
    num_failed: int
    usage: RowUsage
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, shards: Iterable[Shard], **fields: Any) -> Self:
        """
        A manifest with the totals of its shards, in the order of their chunks.

        Raises:
            OutputError: a chunk has none, or two.
        """
        ordered = tuple(sorted(shards, key=lambda shard: shard.index))
        indexes = [shard.index for shard in ordered]
        if indexes != list(range(len(ordered))):
            raise OutputError(
                f"the shards are of other chunks than 0 to {len(ordered) - 1}: some are missing or double"
            )
        return cls(
            shards=ordered,
            num_rows=sum(shard.num_rows for shard in ordered),
            num_failed=sum(shard.num_failed for shard in ordered),
            usage=RowUsage(
                prompt_tokens=sum(shard.usage.prompt_tokens for shard in ordered),
                completion_tokens=sum(shard.usage.completion_tokens for shard in ordered),
                cached_tokens=sum(shard.usage.cached_tokens for shard in ordered),
            ),
            **fields,
        )

    def same_output(self, other: "Manifest") -> bool:
        """Whether both tell of the same objects, made of the same input in the same way."""
        apart = {"started_at", "ended_at", "details"}
        return self.model_dump(exclude=apart) == other.model_dump(exclude=apart)


def commit_manifest(store: ObjectStore, manifest: Manifest) -> Manifest:
    """
    Write the manifest if there is none: the job is done, and all see it at once.

    Returns:
        The manifest that is there: of another run that wrote the same output, where that was first.

    Raises:
        OutputError: there is one of another output.
    """
    try:
        store.put_if_absent(MANIFEST_NAME, manifest.model_dump_json(indent=1).encode() + b"\n")
    except ObjectExists:
        first = read_manifest(store)
        if first is None or not first.same_output(manifest):
            raise OutputError(f"{store} has the {MANIFEST_NAME} of another output: write to another folder") from None
        return first
    return manifest


def read_manifest(store: ObjectStore) -> Manifest | None:
    """
    The manifest of an output's folder; None while its job is not done.

    Raises:
        OutputError: it is no manifest, or of a later version.
    """
    try:
        return Manifest.model_validate_json(store.get(store.url(MANIFEST_NAME)))
    except ObjectNotFound:
        return None
    except ValidationError as error:
        raise OutputError(f"{MANIFEST_NAME} in {store} cannot be read: {error}") from error


def verify_manifest(store: ObjectStore, manifest: Manifest) -> Iterator[str]:
    """What is not as the manifest says, a sentence each, by reading every shard; nothing if all is well."""
    for shard in manifest.shards:
        url = store.url(shard.name)
        try:
            stat = store.stat(url)
        except ObjectNotFound:
            yield f"{shard.name} is missing"
            continue
        if stat.size != shard.size_bytes:
            yield f"{shard.name} has {stat.size:,} bytes: want {shard.size_bytes:,}"
        elif (digest := digest_of(store, url, stat)) != shard.sha256:
            yield f"{shard.name} has the SHA-256 {digest}: want {shard.sha256}"
