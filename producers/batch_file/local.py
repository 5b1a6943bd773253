"""
A batch file from an input to an output that somebody names, without a gateway.

Beside the output lies a folder `<output>.batch`, with the plan and what is done so far; when all is
done, `done.json` is left of it, so that the same command again says what it came to.
"""

import tempfile
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import IO
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, ValidationError

from pagemill.bulk_client import BulkClient
from pagemill.errors import ObjectNotFound
from pagemill.object_store import ObjectStore, open_store
from producers.batch_file.errors import BatchFileError
from producers.batch_file.plan import Order, read_plan
from producers.batch_file.urls import beside, inside, split
from producers.batch_file.work import BatchFile, Ended, Place, Progress
from producers.bulk.lease import OutputLease
from producers.bulk.windows import WINDOW_BYTES

DONE = "done.json"


class Summary(BaseModel):
    """
    What a batch file came to.

    Args:
        output, errors: Where its lines are; errors is empty where there are none.
        source_fingerprint: Of the input.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Ended
    total: int
    completed: int
    failed: int
    output: str
    errors: str
    source_fingerprint: str

    def is_there(self, output: Place, errors: Place) -> bool:
        """Whether all that it wrote still is."""
        wanted = [place for place, url in ((output, self.output), (errors, self.errors)) if url]
        return all(place.store.exists(place.url) for place in wanted)


def place_of(url: str, neighbour: Place | None = None) -> Place:
    """
    The object at an s3:// or file:// URL, or at a path.

    Args:
        neighbour: In the same folder: its store is used.

    Raises:
        SettingsError: it is none of these.
        BatchFileError: it names no object, but a folder.
    """
    folder, name = split(url)
    if not name:
        raise BatchFileError(f"{url} is a folder: want the name of a file in it")
    store = open_store(folder) if neighbour is None else neighbour.store
    return Place(store, unquote(name) if folder.startswith("file:") else name)


def errors_beside(output: str) -> str:
    """Where the error file goes that nobody has named: `out.errors.jsonl` beside `out.jsonl`."""
    path, mark, options = output.partition("?") if "://" in output else (output, "", "")
    return f"{path.removesuffix('.jsonl')}.errors.jsonl{mark}{options}"


def run_file(
    order: Order,
    output: str,
    errors: str,
    client: BulkClient,
    *,
    started: Callable[[BatchFile], object] = lambda _: None,
    on_turn: Callable[[Progress], object] = lambda _: None,
) -> Summary:
    """
    Run a batch file, or what is left of it; one that is done gives its summary at once.

    Args:
        started: Takes the work, whose `stop` interrupts it.

    Raises:
        Rejected: nothing in the input can be served.
        BatchFileError: it cannot start, or was interrupted.
        Occupied: another process writes that output.
        PagemillError: the queue or a store cannot be used.
    """
    place = place_of(output)
    error_place = place_of(errors, place if split(errors)[0] == split(output)[0] else None)
    folder = open_store(beside(output, ".batch"))
    with OutputLease(client, place.url) as lease:

        def turned(progress: Progress) -> None:
            lease.check()
            on_turn(progress)

        work = BatchFile(order, folder, client, turned)
        fingerprint = work.input.fingerprint()
        done = _read_done(folder)
        if done is not None:
            # its process may have died before it had tidied up
            clear(folder, keep=(DONE, split(order.input)[1]))
            if done.source_fingerprint == fingerprint and done.is_there(place, error_place):
                return done
        if read_plan(folder) is None:
            _refuse(output, place)
            _refuse(errors, error_place)
        # what was done was taken away: all begins anew
        folder.delete(folder.url(DONE))
        started(work)
        status = work.run()
        _, error_bytes = work.join(place, error_place)
        progress = work.progress()
        summary = Summary(
            status=status,
            total=progress.total,
            completed=progress.completed,
            failed=progress.failed,
            output=output if progress.completed else "",
            errors=errors if error_bytes else "",
            source_fingerprint=fingerprint,
        )
        folder.put(DONE, summary.model_dump_json(indent=1).encode() + b"\n")
        clear(folder, keep=(DONE,))
        return summary


def clear(folder: ObjectStore, *, keep: Collection[str] = ()) -> None:
    """Delete all that lies in a folder, but some objects."""
    for entry in list(folder.list()):
        if entry.name not in keep:
            folder.delete(entry.url)


def spool(stream: IO[bytes], output: str) -> str:
    """
    Keep an input that can be read only once in the work folder of its output, and give its URL.

    It is named by its content: the same bytes again are the same input, so that a run with them goes on, and others
    take nothing from a run that has begun.
    """
    place = beside(output, ".batch")
    folder = open_store(place)
    digest = sha256()
    with tempfile.TemporaryFile() as copy:
        while window := stream.read(WINDOW_BYTES):
            digest.update(window)
            copy.write(window)
        name = f"input-{digest.hexdigest()[:32]}.jsonl"
        if folder.exists(folder.url(name)):
            return inside(place, name)
        copy.seek(0)
        with folder.open_writer(name) as writer:
            while window := copy.read(WINDOW_BYTES):
                writer.write(window)
    return inside(place, name)


def _refuse(url: str, place: Place) -> None:
    if place.store.exists(place.url):
        raise BatchFileError(f"{url} is there already: name another output, or remove it")


def _read_done(folder: ObjectStore) -> Summary | None:
    try:
        return Summary.model_validate_json(folder.get(folder.url(DONE)))
    except ObjectNotFound:
        return None
    except ValidationError as error:
        raise BatchFileError(f"{DONE} in {folder} cannot be read: {error}") from error
