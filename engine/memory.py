"""How much memory this process may still take."""

from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """
    Bytes that can be taken without swapping: the machine's, or the container's if it has fewer.

    Returns 2 GiB where neither can be read (not Linux).
    """
    limits = [limit for limit in (_machine(proc), _container(cgroup)) if limit is not None]
    return max(0, min(limits)) if limits else 2 * 1024**3


def _machine(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _container(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cached = _reclaimable(cgroup)
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + cached


def _reclaimable(cgroup: Path) -> int:
    # file pages count as used, but the kernel gives them up before it refuses an allocation
    for line in (cgroup / "memory.stat").read_text().splitlines():
        name, value = line.split()
        if name == "inactive_file":
            return int(value)
    return 0
