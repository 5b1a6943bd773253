"""
Where a job comes from in a trace, as W3C's Trace Context has it: two texts that travel with the job.

Reading them needs no library; who writes them is pagemill/tracing.py, or any other program.
"""

import json
import re
from typing import NamedTuple

# version 00 ends behind its flags; others may go on
_TRACEPARENT = re.compile(
    r"(?!ff|00.{53}-)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?"
)

_SAMPLED = 1


class TraceContext(NamedTuple):
    """
    A span of the trace that a job belongs to.

    Args:
        traceparent: Its trace, its id, and whether it is recorded.
        tracestate: What tracing systems add to that; empty for nothing.
    """

    traceparent: str
    tracestate: str = ""

    def members(self) -> bytes:
        """As the members of a JSON object, with a comma behind each."""
        given = {name: text for name, text in self._asdict().items() if text}
        return json.dumps(given)[1:-1].encode() + b","

    def unrecorded(self) -> "TraceContext":
        """The same, for jobs that are to have no spans of their own."""
        head, _, flags = self.traceparent.rpartition("-")
        return self._replace(traceparent=f"{head}-{int(flags, 16) & ~_SAMPLED:02x}")


def trace_id_of(traceparent: str | None) -> str:
    """The trace's id; empty where there is none, or the text is no trace parent, which is then to be ignored."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return found.group(1) if found else ""


def is_sampled_out(traceparent: str | None) -> bool:
    """Whether somebody has decided that nothing is recorded of the trace."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return found is not None and not int(found.group(2), 16) & _SAMPLED
