"""What stops a bulk job as a whole."""

from pagemill.errors import PagemillError


class BulkError(PagemillError):
    """Raised when a bulk job cannot start or go on; the message says what to do."""


class SpecError(BulkError):
    """Raised when a bulk job is not described rightly: change its settings."""


class Occupied(BulkError):
    """Raised when another process works on the same output."""


class Interrupted(BulkError):
    """Raised when a run was told to stop; what it has written stays, and the message says how to go on."""
