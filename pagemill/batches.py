"""Batches: what one is made of, and the calls that open, seal, cancel and read it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pagemill.errors import BatchNotFound, Conflict, InvalidJob
from pagemill.ids import uuid7
from pagemill.keys import QueueKeys
from pagemill.messages import BatchState, BatchStatus, HookDelivery
from pagemill.reply_fields import ReplyContext, check_reply
from pagemill.schema import Metadata, Name, explain
from pagemill.scripts import Arg, Call, load

# as in lua/common.lua
PACE_S = 300.0
# what tells anything of a batch's pace
PACE_LEAST_S, PACE_LEAST_JOBS = 5.0, 0.5

# open jobs that one call looks at
CANCEL_LOOKS = 256

_URL = re.compile(r"https?://[!-~]+", re.IGNORECASE)


def http_url(url: str) -> str:
    """
    Raises:
        ValueError: it is not the URL of a web server, or holds a password or a line break.
    """
    parts = urlsplit(url)
    if not _URL.fullmatch(url) or not parts.hostname or parts.port == 0:
        raise ValueError("want http://host/path or https://host/path, in ASCII")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL with a password in it would be kept in the queue: leave it out")
    return url


class Batch(BaseModel):
    """
    A batch to be created: jobs that are counted, cancelled and waited for together.

    Args:
        id: Made by the client; creating the same batch again finds the first.
        tenant: Whose it is.
        result_ttl_s: Seconds that its counts are kept after its end.
        webhook: A URL that is told when it has ended.
        reply_to: The stream of replies that is told of its end, once (replies.py).
        reply_context: Handed back with that reply; never read. At most 256 KiB.
        metadata: Returned with its status and sent to the webhook; never read. At most 16 KiB.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Name = Field(default_factory=uuid7)
    tenant: Name = "default"
    result_ttl_s: int = Field(86400, ge=1, le=30 * 86400)
    webhook: Annotated[str, Field(max_length=2048), AfterValidator(http_url)] | None = None
    reply_to: Name | None = None
    reply_context: ReplyContext | None = None
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_reply(self) -> Self:
        check_reply(self.reply_to, self.reply_context)
        return self

    @classmethod
    def build(cls, **fields: Any) -> Self:
        """
        Validate the fields of a batch; what is None counts as not given.

        Raises:
            InvalidJob: with every fault in one message.
        """
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise InvalidJob("invalid_batch", explain(error)) from None

    def fingerprint(self) -> str:
        """What makes two batches the same, besides the id."""
        return blake2b(self.model_dump_json(exclude={"id"}).encode(), digest_size=16).hexdigest()


def create_batch(keys: QueueKeys, batch: Batch) -> Call[BatchStatus]:
    """
    Raises, when the reply is read:
        Conflict: the id is another batch's.
    """
    metadata = json.dumps(batch.metadata) if batch.metadata else ""

    def parse(reply: list[bytes]) -> BatchStatus:
        if not reply:
            raise Conflict(batch.id, f"there is a batch {batch.id} already, with other fields")
        return _parse(keys, batch.id, reply)

    args: list[Arg] = [batch.id, batch.fingerprint(), batch.tenant, batch.result_ttl_s, metadata, batch.webhook or ""]
    args += [batch.reply_to or "", batch.reply_context or ""]
    return Call(load("create_batch"), keys.base, args, parse)


def seal_batch(keys: QueueKeys, batch_id: str) -> Call[BatchStatus]:
    """
    Raises, when the reply is read:
        BatchNotFound: the queue does not know it.
    """
    return Call(load("seal_batch"), keys.base, [batch_id], lambda reply: _parse(keys, batch_id, reply))


def cancel_batch(keys: QueueKeys, batch_id: str) -> Call[BatchStatus]:
    """As `seal_batch`; ends a first page of its jobs."""
    args: list[Arg] = [CANCEL_LOOKS, batch_id]
    return Call(load("cancel_batches"), keys.base, args, lambda reply: _parse(keys, batch_id, reply[2]))


def cancel_more(keys: QueueKeys, *, limit: int) -> Call[tuple[int, bool]]:
    """Ends a page of jobs of one of the cancelled batches; gives how many, and whether more are left."""
    return Call(load("cancel_batches"), keys.base, [limit, ""], lambda reply: (reply[0], reply[1] == 1))


def _parse(keys: QueueKeys, batch_id: str, reply: Sequence[bytes]) -> BatchStatus:
    return read_batch(keys, batch_id, dict(zip(reply[::2], reply[1::2], strict=True)))


def take_hooks(keys: QueueKeys, *, limit: int, hold_ms: int) -> Call[list[BatchStatus]]:
    """Batches whose webhooks are due; each is due again after `hold_ms` if nobody settles it."""

    def parse(reply: list[list[bytes]]) -> list[BatchStatus]:
        return [_parse(keys, batch_id.decode(), fields) for batch_id, *fields in reply]

    return Call(load("take_hooks"), keys.base, [limit, hold_ms], parse)


def settle_hook(keys: QueueKeys, batch_id: str, delivery: HookDelivery) -> Call[str]:
    """Gives the state of the webhook after that; empty where it was settled before."""
    args: list[Arg] = [batch_id, delivery.outcome, delivery.delay_ms, delivery.why]
    return Call(load("settle_hook"), keys.base, args, lambda reply: reply.decode())


def read_batch(keys: QueueKeys, batch_id: str, values: Mapping[bytes, bytes]) -> BatchStatus:
    """
    A batch from its hash.

    Raises:
        BatchNotFound: it is empty.
    """
    fields = {name.decode(): value.decode() for name, value in values.items()}
    if not fields:
        raise BatchNotFound(f"queue {keys.queue} has no batch {batch_id}, or it has expired")

    def number(name: str) -> int:
        return int(fields.get(name, 0))

    return BatchStatus(
        batch_id=batch_id,
        queue=keys.queue,
        tenant=fields["tn"],
        state=_state(fields),
        total=number("total"),
        done=number("done"),
        failed=number("failed"),
        cancelled=number("cancelled"),
        expired=number("expired"),
        prompt_tokens=number("prompt_tokens"),
        completion_tokens=number("completion_tokens"),
        gpu_ms=number("gpu_ms"),
        created_ms=number("created"),
        sealed_ms=number("sealed"),
        ended_ms=number("ended"),
        cancel_requested="cancel" in fields,
        webhook=fields.get("hook", ""),
        webhook_state=fields.get("hook_st", ""),
        webhook_tries=number("hook_n"),
        webhook_reason=fields.get("hook_err", ""),
        metadata=json.loads(fields.get("md", "{}")),
        pace=float(fields.get("pace", 0)),
        pace_at_ms=number("pace_at"),
        pace_from_ms=number("pace_from"),
    )


def time_left_s(batch: BatchStatus, now_ms: int) -> float | None:
    """
    Seconds until its open jobs have ended, if they go on as those of the last minutes; None where nothing is
    known, or so little ends that it would be a guess.

    Args:
        now_ms: By the server's clock.
    """
    if batch.num_open <= 0 or not batch.pace_from_ms:
        return None
    ended_now = batch.pace * _faded(now_ms - batch.pace_at_ms)
    span_s = (now_ms - batch.pace_from_ms) / 1000
    if span_s < PACE_LEAST_S or ended_now < PACE_LEAST_JOBS:
        return None
    return batch.num_open * PACE_S * (1 - _faded(now_ms - batch.pace_from_ms)) / ended_now


def _faded(elapsed_ms: int) -> float:
    return math.exp(-max(0, elapsed_ms) / 1000 / PACE_S)


def _state(fields: Mapping[str, str]) -> BatchState:
    if "ended" in fields:
        return "ended"
    if "cancel" in fields:
        return "cancelling"
    return "sealed" if "sealed" in fields else "open"
