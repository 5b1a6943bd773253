"""Looking at processes."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    # it may end between the opening and the reading
    except (FileNotFoundError, ProcessLookupError):
        return False
