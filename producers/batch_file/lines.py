"""The lines of an input file as rows: told apart, named, not yet looked into."""

from collections.abc import Callable

from producers.batch_file.records import BatchFault
from producers.bulk.columns import MAX_ID_CHARS, Columns, Item
from producers.bulk.lines import LongLine
from producers.bulk.rows import Document, RowFault
from producers.openai_api.batch_lines import ENDPOINTS, Endpoint
from producers.openai_api.errors import ApiError
from producers.openai_api.requests import read_json

# that a batch which cannot run tells of
MAX_FAULTS = 100

# names of models that are asked for; who makes more of them up gets the same answer
MAX_MODELS = 256


def parse_line(line: bytes | LongLine, columns: Columns, row: int) -> Item:
    """A line with its custom_id, its text as it is, and where it wants to go; or what is wrong with it."""
    if isinstance(line, LongLine):
        return columns.too_long(row, None, len(line))
    try:
        fields = read_json(line)
    except ApiError as error:
        if error.code == "invalid_encoding":
            return RowFault(row, None, "invalid_encoding", error.message)
        return RowFault(row, None, "invalid_json", error.message)
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        message = f"custom_id is not a text of 1 to {MAX_ID_CHARS} characters"
        return RowFault(row, None, "invalid_custom_id", message)
    model = body.get("model") if isinstance(body, dict) else None
    return Document(row, custom_id, line.decode(), {"url": fields.get("url"), "model": model})


class Survey:
    """
    Finds out, while the lines go by, what they want as a whole.

    The endpoint is the one that was asked for, or the first line's that has one; the model is the first
    one of that endpoint's lines that is served.

    Args:
        serves: Whether a queue serves a model.
    """

    def __init__(self, endpoint: Endpoint | None, serves: Callable[[str], bool]) -> None:
        self._serves = serves
        self._known: dict[str, bool] = {}

        self.endpoint = endpoint
        self.model: str | None = None
        # of the first lines that cannot be served: all there is to say where none can
        self.faults: list[BatchFault] = []

    def parse(self, line: bytes | LongLine, columns: Columns, row: int) -> Item:
        """As `parse_line`."""
        item = parse_line(line, columns, row)
        if self.model is None:
            fault = self._look(item)
            if fault is not None and len(self.faults) < MAX_FAULTS:
                self.faults.append(fault)
        return item

    def _look(self, item: Item) -> BatchFault | None:
        if isinstance(item, RowFault):
            return BatchFault(code=item.code, message=item.message, line=item.row + 1)
        url, model = item.fields["url"], item.fields["model"]
        line = item.row + 1
        if self.endpoint is None and url in ENDPOINTS:
            self.endpoint = url
        if self.endpoint is None or url != self.endpoint:
            wanted = self.endpoint or " or ".join(ENDPOINTS)
            return BatchFault(code="invalid_url", message=f"the url is not {wanted}", param="url", line=line)
        if not isinstance(model, str) or not model:
            return BatchFault(code="missing_model", message="the body names no model", param="body.model", line=line)
        if not self._is_served(model):
            message = f"no worker serves the model {model[:100]!r}"
            return BatchFault(code="model_not_found", message=message, param="body.model", line=line)
        self.model = model
        return None

    def _is_served(self, model: str) -> bool:
        if model not in self._known and len(self._known) < MAX_MODELS:
            self._known[model] = self._serves(model)
        return self._known.get(model, False)
