"""A folder as an object store: objects are files, whole or not there at all."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import unquote_to_bytes, urlsplit
from uuid import uuid4

from pagemill.errors import ObjectChanged, ObjectExists, ObjectNotFound, ObjectStoreError, StoreAway
from pagemill.objects import ObjectEntry, ObjectStat

# what a folder says for ever
_WRONG_PLACE = (PermissionError, NotADirectoryError, IsADirectoryError)

# how the files begin that are still being written: no listing shows them
_UNFINISHED = ".put-"


class FileStore:
    """Objects as files below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def __repr__(self) -> str:
        return f"FileStore({self.root})"

    def __str__(self) -> str:
        return str(self.root)

    def url(self, name: str) -> str:
        return self._inside(self.root / name).as_uri()

    def put(self, name: str, data: bytes) -> str:
        with self.open_writer(name) as writer:
            writer.write(data)
        return writer.url

    def put_if_absent(self, name: str, data: bytes) -> str:
        with self.open_writer(name, if_absent=True) as writer:
            writer.write(data)
        return writer.url

    def open_writer(self, name: str, *, if_absent: bool = False) -> "FileWriter":
        return FileWriter(self._inside(self.root / name), if_absent=if_absent)

    def get(self, url: str) -> bytes:
        path = self._path(url)
        with _read_errors(path):
            return path.read_bytes()

    def get_range(self, url: str, start: int, length: int, etag: str | None = None) -> bytes:
        path = self._path(url)
        with _read_errors(path), path.open("rb") as file:
            # of the open file: a name may be given to another one in between
            if etag is not None and etag != _etag(os.fstat(file.fileno())):
                raise ObjectChanged(f"the object {url} is not what it was: it was written anew")
            file.seek(start)
            return file.read(max(length, 0))

    def stat(self, url: str) -> ObjectStat:
        path = self._path(url)
        with _read_errors(path):
            found = path.stat()
        if not path.is_file():
            raise ObjectNotFound(f"there is no object {path}")
        return ObjectStat(found.st_size, _etag(found))

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        folder = self.root / prefix.rpartition("/")[0]
        try:
            self._inside(folder)
            yield from self._walk(folder, prefix)
        except OSError as error:
            raise _kind_of(error)(f"cannot list {folder}: {error}") from error

    def _walk(self, folder: Path, prefix: str) -> Iterator[ObjectEntry]:
        for packed in _names_in(folder):
            path = folder / os.fsdecode(packed)
            name = path.relative_to(self.root).as_posix()
            if packed.endswith(b"/"):
                if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                    yield from self._walk(path, prefix)
            elif name.startswith(prefix) and not path.name.startswith(_UNFINISHED):
                try:
                    status = path.lstat()
                    if stat.S_ISLNK(status.st_mode):
                        status = path.stat()
                        self._inside(path)
                except FileNotFoundError:
                    # deleted meanwhile, or a link to nothing
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield ObjectEntry(name, path.as_uri(), status.st_size, _etag(status))

    def exists(self, url: str) -> bool:
        return self._path(url).is_file()

    def delete(self, url: str) -> None:
        path = self._path(url)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _kind_of(error)(f"cannot delete {path}: {error}") from error

    def _path(self, url: str) -> Path:
        try:
            parts = urlsplit(url)
            if parts.scheme == "file":
                # a file's name may be no text
                return self._inside(Path(os.fsdecode(unquote_to_bytes(parts.path))))
        except ValueError:
            # a host that is none, a NUL or half a surrogate pair: no URL that a store has given
            pass
        raise ObjectStoreError(f"the object {url!r} is not in {self}")

    def _inside(self, path: Path) -> Path:
        # resolved: neither dots nor links lead out
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise ObjectStoreError(f"the object {str(path)!r} is not in {self}")
        return path


class FileWriter:
    """
    Writes a file beside its place, and names it when its bytes are safe.

    Args:
        if_absent: Leaving raises ObjectExists if there is such a file by then.
    """

    def __init__(self, path: Path, *, if_absent: bool) -> None:
        self.url = path.as_uri()
        self._path = path
        self._if_absent = if_absent
        self._written = path.with_name(f"{_UNFINISHED}{uuid4().hex}")

    def __enter__(self) -> Self:
        with self._errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # whoever may read what this process writes may read this
            written = os.open(self._written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._file = os.fdopen(written, "wb")
        return self

    def write(self, data: bytes | bytearray | memoryview) -> int:
        with self._errors():
            return self._file.write(data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            with self._errors(), self._file:
                if kind is None:
                    self._file.flush()
                    # the name must not appear before the bytes are safe
                    os.fsync(self._file.fileno())
            if kind is None:
                with self._errors():
                    self._name()
        finally:
            with contextlib.suppress(OSError):
                self._written.unlink(missing_ok=True)

    def _name(self) -> None:
        if self._if_absent:
            try:
                # unlike a rename, a link never takes the place of another
                os.link(self._written, self._path)
            except FileExistsError:
                raise ObjectExists(f"there is an object {self._path} already") from None
        else:
            self._written.replace(self._path)
        # a name is safe when its folder is; some folders of networks cannot say so
        with contextlib.suppress(OSError):
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _kind_of(error)(f"cannot write {self._path}: {error}") from error


def _names_in(folder: Path) -> list[bytes]:
    """
    The names of a folder that may be gone, those of folders with a slash, in the order of their bytes.

    So names come in the order that most buckets have. Of a million files no more than that is held.
    """
    try:
        with os.scandir(folder) as found:
            return sorted(os.fsencode(one.name) + (b"/" if one.is_dir(follow_symlinks=False) else b"") for one in found)
    except FileNotFoundError:
        return []


def _etag(status: os.stat_result) -> str:
    # a file that is replaced has another inode, one that is written in place another time or size
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ObjectNotFound(f"there is no object {path}") from None
    except OSError as error:
        raise _kind_of(error)(f"cannot read {path}: {error}") from error


def _kind_of(error: OSError) -> type[ObjectStoreError]:
    return ObjectStoreError if isinstance(error, _WRONG_PLACE) else StoreAway
