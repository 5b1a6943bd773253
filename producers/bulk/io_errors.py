"""What can be wrong with a bulk job's input or output as a whole; a fault of one row is a RowFault."""

from pagemill.errors import PagemillError


class SourceError(PagemillError):
    """Raised when an input cannot be read as what it is said to be: change the input or how it is named."""


class OutputError(PagemillError):
    """Raised when an output folder holds something else than this job would write: choose another, or clear it."""
