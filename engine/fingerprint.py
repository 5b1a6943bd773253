"""A name for the very model that an engine runs, so that work is resumed only on an equal one."""

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 1024 * 1024


def fingerprint(model: Path, *settings: str) -> str:
    """
    Hash the model's config, tokenizer and weights with the settings that change its answers.

    Of each weight file its size and first and last MiB are read: reading all of it would
    cost more than loading it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for setting in settings:
        digest.update(setting.encode() + b"\0")
    for name in ("config.json", "tokenizer.json"):
        path = model / name
        digest.update(path.read_bytes() if path.exists() else b"\0")
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
