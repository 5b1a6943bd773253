"""Files and batches as OpenAI's API shows them."""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from producers.openai_api.batch_lines import Endpoint

T = TypeVar("T")

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]

# nothing changes any more
FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """
    A file.

    Args:
        bytes: Its size.
        created_at, expires_at: Seconds since 1970.
    """

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class BatchFault(_Record):
    """
    Why a batch cannot run at all.

    Args:
        line: Of its input file, from 1.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(_Record):
    object: Literal["list"] = "list"
    data: tuple[BatchFault, ...]


class RequestCounts(_Record):
    """Lines of the input: all, with a response, and without; both move while the batch runs."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(_Record):
    """
    A batch.

    Args:
        model: That its lines name.
        created_at and the other times: Seconds since 1970; null for what has not come to pass.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str | None = None
    errors: BatchFaults | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: Metadata | None = None


class Page(_Record, Generic[T]):
    """Some of a list, as OpenAI pages it: `after` the last one's id comes the next page."""

    object: Literal["list"] = "list"
    data: tuple[T, ...]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
