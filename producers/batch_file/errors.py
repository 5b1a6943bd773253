"""What stops a batch file as a whole."""

from collections.abc import Sequence

from pagemill.errors import PagemillError
from producers.batch_file.records import BatchFault


class BatchFileError(PagemillError):
    """Raised when a batch file cannot be run; the message says what to do."""


class Rejected(BatchFileError):
    """
    Raised when no line of an input could be served.

    Args:
        faults: What is wrong with it, or with its first lines.
    """

    def __init__(self, faults: Sequence[BatchFault]) -> None:
        first = faults[0]
        where = f"line {first.line}: " if first.line is not None else ""
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"no line of the input can be served: {where}{first.message}{more}")
        self.faults = tuple(faults)
