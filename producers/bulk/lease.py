"""One process at a time works on an output: whoever comes second is told who was first."""

import hashlib
import os
import socket
import threading
import time
from types import TracebackType
from typing import Self

from pagemill.bulk_client import BulkClient
from pagemill.errors import PagemillError
from producers.bulk.errors import Occupied

LEASE_S = 15.0


class OutputLease:
    """
    Held while this is entered; renewed by a thread of its own.

    A process that was killed leaves its lease behind. It is taken over at once where this machine
    knows that it is gone, and elsewhere when it has run out, which is waited for.

    Args:
        wait: For a lease that may run out; else Occupied is raised at once.
    """

    def __init__(self, client: BulkClient, output: str, *, lease_s: float = LEASE_S, wait: bool = True) -> None:
        self._client, self._output, self._lease_s = client, output, lease_s
        self._wait_s = 1.25 * lease_s if wait else 0.0
        self.name = lease_name(output)
        self._holder = f"{_system()} {os.getpid()} {time.time_ns()}"
        self._over = threading.Event()
        self._lost = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Self:
        """
        Raises:
            Occupied: another process has it, and goes on having it.
        """
        patience = time.monotonic() + self._wait_s
        while True:
            holder, left_s = self._client.take_lease(self.name, self._holder, self._lease_s)
            if holder == self._holder:
                break
            if is_gone(holder):
                self._client.give_lease_back(self.name, holder)
            elif time.monotonic() > patience:
                raise Occupied(f"{self._output} is being worked on by {describe(holder)}: wait for it, or stop it")
            else:
                time.sleep(min(max(left_s, 0.05), 0.5))
        self._renewer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            # whoever says so does not wait for a server that is silent: as after a kill
            return
        self._renewer.join()
        if not self._lost.is_set():
            try:
                self._client.give_lease_back(self.name, self._holder)
            except PagemillError:
                # it runs out
                return

    def check(self) -> None:
        """
        Raises:
            Occupied: another process took it over, as after a pause of this one.
        """
        if self._lost.is_set():
            raise Occupied(f"another process has taken over {self._output}: this one was silent for too long")

    def _renew(self) -> None:
        while not self._over.wait(self._lease_s / 4):
            try:
                holder, _ = self._client.take_lease(self.name, self._holder, self._lease_s)
            except PagemillError:
                # the server is away, for others too
                continue
            if holder != self._holder:
                self._lost.set()
                return


def lease_name(output: str) -> str:
    return "bulk-" + hashlib.blake2b(output.rstrip("/").encode(), digest_size=12).hexdigest()


def is_gone(holder: str) -> bool:
    """Whether the holder was a process of this system, and is none any more."""
    system, _, rest = holder.partition(" ")
    pid = rest.partition(" ")[0]
    if system != _system() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def describe(holder: str) -> str:
    system, _, rest = holder.partition(" ")
    return f"process {rest.partition(' ')[0]} on {system.partition('/')[0]}"


def _system() -> str:
    """This machine since its start, and this container on it: where a process number means one process."""
    marks = [socket.gethostname().replace(" ", "_")]
    for path, read in (("/proc/sys/kernel/random/boot_id", _text), ("/proc/self/ns/pid", os.readlink)):
        try:
            marks.append(read(path).strip())
        except OSError:
            # no Linux: the name is all there is, and a lease then runs out
            marks.append(str(os.getpid()))
    return "/".join(marks)


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
