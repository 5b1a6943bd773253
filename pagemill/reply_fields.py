"""What a job or a batch says of the reply that it wants (replies.py), and its limits."""

from typing import Annotated

from pydantic import AfterValidator

# kept in the queue until the end, and handed back with the reply
MAX_CONTEXT_BYTES = 256 * 1024


def _short(context: str) -> str:
    num_bytes = len(context.encode(errors="replace"))
    if num_bytes > MAX_CONTEXT_BYTES:
        raise ValueError(f"{num_bytes:,} bytes: want no more than {MAX_CONTEXT_BYTES:,}")
    return context


ReplyContext = Annotated[str, AfterValidator(_short)]


def check_reply(reply_to: str | None, context: str | None) -> None:
    """
    Raises:
        ValueError: there is a context, and no reply that it could come back with.
    """
    if context is not None and reply_to is None:
        raise ValueError("reply_context comes back with a reply: give reply_to too")
