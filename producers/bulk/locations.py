"""Which objects an input's URL means."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pagemill.errors import ObjectNotFound
from pagemill.object_store import ObjectStore, open_store
from pagemill.objects import ObjectEntry
from producers.bulk.io_errors import SourceError

_MAGIC = re.compile(r"[*\[]")


@dataclass(frozen=True, slots=True)
class Location:
    """
    A place in a store: one object, all of a folder, or those that a pattern names.

    Args:
        path: Inside the store: a name, a folder, or a pattern.
    """

    store: ObjectStore
    path: str
    is_pattern: bool

    def objects(self) -> Iterator[ObjectEntry]:
        """
        Each object with its name below the folder, always in the same order.

        Left out are those of which a part of the name begins with "." or "_": marks and leavings of other programs.

        Raises:
            SourceError: there is none.
        """
        found = False
        for entry in self._objects():
            found = True
            yield entry
        if not found:
            raise SourceError(f"no object is called {str(self.store).rstrip('/')}/{self.path} or lies below it")

    def _objects(self) -> Iterator[ObjectEntry]:
        if self.is_pattern:
            fixed = _MAGIC.split(self.path, maxsplit=1)[0]
            yield from self._below(fixed.rpartition("/")[0], fixed, _pattern(self.path))
            return
        try:
            if self.path and not self.path.endswith("/"):
                url = self.store.url(self.path)
                stat = self.store.stat(url)
                yield ObjectEntry(_shown(self.path.rpartition("/")[2]), url, stat.size, stat.etag)
                return
        except ObjectNotFound:
            pass
        folder = self.path.rstrip("/")
        yield from self._below(folder, f"{folder}/" if folder else "", re.compile(""))

    def _below(self, folder: str, prefix: str, pattern: re.Pattern[str]) -> Iterator[ObjectEntry]:
        for entry in self.store.list(prefix):
            name = entry.name[len(folder) + 1 if folder else 0 :]
            marks = any(part.startswith((".", "_")) for part in name.split("/"))
            # a bucket's folders may be objects of no bytes
            if not marks and not entry.name.endswith("/") and pattern.match(entry.name):
                yield replace(entry, name=_shown(name))


def locate(url: str) -> Location:
    """
    The place that `s3://bucket/path?endpoint=...`, `file:///path` or a path of this machine means.

    A path may hold `*`, which stops at a slash, `**`, which does not, and `[abc]`. An S3 path is taken as it stands,
    without unquoting.

    Raises:
        SettingsError: the URL is none of these.
    """
    if url.startswith("s3://"):
        place, mark, options = url.removeprefix("s3://").partition("?")
        bucket, _, path = place.partition("/")
        return Location(open_store(f"s3://{bucket}{mark}{options}"), path, bool(_MAGIC.search(path)))
    if "://" in url:
        parts = urlsplit(url)
        # let the store say what is wrong with another scheme
        path = unquote(parts.path) if parts.scheme == "file" and not parts.netloc else ""
        if not path:
            open_store(url)
    else:
        path = absolute(url)
    return _local(path)


def absolute(url: str) -> str:
    """A path of this machine as it is from everywhere; a URL as it is."""
    return url if "://" in url else str(Path(url).absolute()) + ("/" if url.endswith("/") else "")


def open_folder(url: str) -> ObjectStore:
    """
    The folder that `s3://bucket/path?endpoint=...`, `file:///path` or a path of this machine means, for output.

    Raises:
        SettingsError: the URL is none of these.
    """
    return open_store(url if "://" in url else Path(url).absolute().as_uri())


def _local(path: str) -> Location:
    # a file may be called like a pattern
    is_pattern = bool(_MAGIC.search(path)) and not Path(path).exists()
    if is_pattern:
        root = Path(_MAGIC.split(path, maxsplit=1)[0].rpartition("/")[0] or "/")
    else:
        root = Path(path) if Path(path).is_dir() else Path(path).parent
    inside = path.removeprefix(str(root)).lstrip("/")
    return Location(open_store(root.as_uri()), inside, is_pattern)


def _shown(name: str) -> str:
    # a file's name may be no text, and a plan is
    return name.encode(errors="backslashreplace").decode()


def _pattern(path: str) -> re.Pattern[str]:
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    parts = re.split(r"(\*\*/|\*\*|\*|\[[^]/]+\])", path)
    return re.compile(
        "".join(meanings.get(part) or (part if part[:1] == "[" else re.escape(part)) for part in parts) + r"\Z"
    )
