"""Files as OpenAI's objects, and as objects of the store."""

import time
from typing import Any

# read and written in pieces of that size
PIECE_BYTES = 1024 * 1024


def object_name(tenant: str, name: str) -> str:
    """Where a file is in the store."""
    return f"files/{tenant}/{name}"


def file_body(name: str, size: int, filename: str, purpose: str, ttl_s: int) -> dict[str, Any]:
    now = int(time.time())
    return {
        "id": name,
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": now + ttl_s,
        "filename": filename[:255],
        "purpose": purpose,
        "status": "processed",
    }
