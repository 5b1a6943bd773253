"""From a line to jobs, and from their results to a line of the output or of the errors."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from pagemill.schema import Job, Result
from producers.batch_file.parts import LineEnd
from producers.bulk.rows import Document, RowFault
from producers.bulk.work import Work
from producers.openai_api.batch_lines import BadLine, BatchRequest, error_line, output_line, read_line
from producers.openai_api.errors import ApiError, bad_request
from producers.openai_api.jobs import Terms

# what OpenAI calls them
_CODES = {"invalid_json": "invalid_json_line", "line_too_long": "line_too_long"}


@dataclass(slots=True)
class Tally:
    """Lines that have ended, with and without a response."""

    completed: int = 0
    failed: int = 0

    def add(self, end: LineEnd) -> LineEnd:
        if end.completed:
            self.completed += 1
        else:
            self.failed += 1
        return end


class LineTask:
    """
    Runs the lines of one input file.

    The id of a job is a hash of the batch, the custom_id and all that the job says, so that a run that
    comes again finds what it has submitted already.

    Args:
        name: Of the batch: no two have the same.
        model: The one that all lines must name, as one queue answers them.
        tally: Counts the lines that end.
    """

    def __init__(self, name: str, endpoint: str, model: str, terms: Terms, tally: Tally) -> None:
        self._name, self._endpoint, self._model, self._terms, self._tally = name, endpoint, model, terms, tally

    def work(self, document: Document) -> Work[LineEnd]:
        """The jobs of a line, and how it ended."""
        end = yield from self._run(document)
        return self._tally.add(end)

    def fault(self, fault: RowFault) -> LineEnd:
        """The end of a line that is no request."""
        code = _CODES.get(fault.code, fault.code)
        status = 413 if fault.code == "line_too_long" else 400
        error = ApiError(status, f"line {fault.row + 1}: {fault.message}", code=code)
        return self._tally.add(self._failed(fault.row, fault.custom_id or "", error))

    def _run(self, document: Document) -> Generator[Sequence[Job], Sequence[Result], LineEnd]:
        try:
            request = read_line(document.text.encode(), self._endpoint)
            if request.request.model != self._model:
                raise _other_model(request.request.model, self._model)
            jobs = self._jobs(request)
        except BadLine as error:
            return self._failed(document.row, document.custom_id, error)
        except ApiError as error:
            return self._failed(document.row, document.custom_id, error)
        results = yield jobs
        return LineEnd(*output_line(request, results))

    def _jobs(self, request: BatchRequest) -> list[Job]:
        jobs = []
        for place, job in enumerate(request.jobs(self._terms)):
            where = f"{self._name}\0{request.custom_id}\0{place}\0".encode()
            name = blake2b(where + job.body(), digest_size=16).hexdigest()
            jobs.append(job.model_copy(update={"id": f"line-{name}"}))
        return jobs

    def _failed(self, row: int, custom_id: str, error: ApiError) -> LineEnd:
        return LineEnd(error_line(custom_id, f"{self._name}-{row + 1}", error), completed=False)


def _other_model(model: str, wanted: str) -> ApiError:
    message = f"the model is {model[:100]!r}: the batch's is {wanted!r}, and a batch has one"
    return bad_request(message, "body.model", "mismatched_model")


def terms_of(tenant: str, batch: str, context_tokens: int) -> Terms:
    """What is decided of all lines alike."""
    return replace(Terms(tenant=tenant, lane="bulk", batch=batch, result_ttl_s=2 * 86400), max_model_len=context_tokens)
