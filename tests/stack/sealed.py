"""
Runs a program as `read_only: true` runs a container: it may write into the folders that are named, and nowhere else.

    python -m tests.stack.sealed [--tmp=FOLDER] FOLDER... -- PROGRAM ARGUMENT...

A folder stands for /tmp, as a tmpfs does, but where this checkout or its environment lies below /tmp: then that stays
as it is. The other folders must not be below it. The program has a view of its own of the
file system (Linux, with user namespaces), where all else is read-only but /dev and /proc. It takes this process over,
and ends with whoever started it, as producers/child.py says.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_BIND, _REMOUNT, _READ_ONLY = 4096, 32, 1
_PR_SET_PDEATHSIG = 1
CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def seal(folders: Sequence[str], tmp: str | None = None) -> None:
    """
    From now on this process and its children may write into these folders alone.

    Args:
        tmp: The folder that they see as /tmp.

    Raises:
        OSError: the system does not grant it.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_USER | _NEW_MOUNTS))
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)
    places = [(folder, folder) for folder in folders]
    if tmp:
        places.append(("/tmp" if hidden_by("/tmp", (CHECKOUT, sys.prefix, sys.base_prefix)) else tmp, "/tmp"))
    for folder, place in places:
        _check(
            libc.mount(os.fsencode(os.path.realpath(folder)), os.fsencode(os.path.realpath(place)), None, _BIND, None)
        )
    # a mount of its own stays as it is
    _check(libc.mount(None, b"/", None, _BIND | _REMOUNT | _READ_ONLY, None))


def hidden_by(mount: str, paths: Sequence[str]) -> bool:
    """Whether any of these paths would be out of sight behind what is mounted there."""
    return any(os.path.commonpath((os.path.realpath(mount), os.path.realpath(path))) == mount for path in paths)


def can_seal() -> bool:
    """Whether the system grants it; asked of a process of its own, as there is no way back."""
    child = os.fork()
    if child == 0:
        try:
            seal([])
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> None:
    end = sys.argv.index("--")
    folders = sys.argv[1:end]
    tmp = folders.pop(0).removeprefix("--tmp=") if folders and folders[0].startswith("--tmp=") else None
    parent = os.getppid()
    seal(folders, tmp)
    # the kernel has forgotten it, as our rights have changed
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
    command = sys.argv[end + 1 :]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
