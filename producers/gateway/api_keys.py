"""
API keys: known by the SHA-256 of what callers send, so that the file of keys opens no door.

The file is TOML, a table a key:

    [keys.alice]
    sha256 = "9f86d0..."
    tenant = "alice"
    requests_per_minute = 60
    tokens_per_minute = 100000
    tokens_per_day = 5000000

    [keys.operator]
    sha256 = "60303a..."
    operator = true
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagemill.errors import SettingsError
from pagemill.schema import Name, explain

PREFIX = "pm-"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

_Limit = Annotated[int, Field(ge=1, le=10**12)]


class ApiKey(BaseModel):
    """
    A caller. Limits that are not given do not apply.

    Args:
        sha256: Of the key, in hexadecimal digits.
        tenant: Who pays in the queue, and whose files and batches are seen.
        tokens_per_day: Of prompts and answers, from midnight to midnight in UTC.
        operator: May look at the status page, which shows the work of all tenants.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: Name = "default"
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    tokens_per_day: _Limit | None = None
    operator: bool = False

    @property
    def id(self) -> str:
        """What names its counters: tells nothing of the key."""
        return self.sha256[:32]

    @property
    def is_limited(self) -> bool:
        return any((self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day))


# who calls where there are no keys
ANYBODY = ApiKey(sha256="0" * 64)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: dict[str, ApiKey] = Field(default_factory=dict)


class KeyRing:
    """The keys of a file; one that was changed is read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed_ns = -1
        self._by_hash: Mapping[str, ApiKey] = {}
        self.refresh()

    def __len__(self) -> int:
        return len(self._by_hash)

    def refresh(self) -> None:
        """
        Read the file if it has changed.

        Raises:
            SettingsError: it cannot be read, or breaks the format; the keys stay as they were.
        """
        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                self._by_hash = {key.sha256: key for key in _read(self._path)}
                self._changed_ns = changed_ns
        except OSError as error:
            raise SettingsError(f"the keys' file {self._path} cannot be read: {error.strerror}") from None

    def find(self, presented: str) -> ApiKey | None:
        """The key that a caller presents; None where there is no such."""
        digest = hash_of(presented)
        found = self._by_hash.get(digest)
        # the table is asked for a hash, whose bytes tell nothing of a key that is nearly right
        return found if found is not None and hmac.compare_digest(found.sha256, digest) else None


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def entry(
    name: str,
    key: str,
    *,
    tenant: str | None = None,
    limits: Mapping[str, int | None] | None = None,
    operator: bool = False,
) -> str:
    """
    The table for the file of keys.

    Raises:
        SettingsError: the name, the tenant or a limit cannot be.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"the key's name is {name!r}: want letters, digits, dashes, underscores")
    given = {limit: value for limit, value in (limits or {}).items() if value is not None}
    try:
        made = ApiKey.model_validate({"sha256": hash_of(key), "tenant": tenant or name, **given})
    except ValidationError as error:
        raise SettingsError(f"the key {name}: {explain(error)}") from None
    lines = [f"[keys.{name}]", f'sha256 = "{made.sha256}"', f'tenant = "{made.tenant}"']
    lines += [f"{limit} = {value}" for limit, value in given.items()]
    return "\n".join([*lines, *(["operator = true"] if operator else [])])


def _read(path: Path) -> list[ApiKey]:
    try:
        read = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the keys' file {path} is not TOML: {error}") from None
    except ValidationError as error:
        # what was given is not shown: somebody may have put the key itself there
        where = sorted({".".join(map(str, one["loc"])) for one in error.errors(include_input=False)})
        raise SettingsError(f"the keys' file {path}: wrong are {', '.join(where)[:500]}") from None
    return list(read.keys.values())
