"""From a document to jobs, and from their results to a row of the output."""

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from pagemill.errors import InvalidJob
from pagemill.schema import Job, Message, Options, Result, ResultStatus, Usage
from producers.bulk.errors import SpecError
from producers.bulk.map_reduce import NoRoom, Plan, TooLong, levels
from producers.bulk.prompts import NEEDS, Place, Prompter, TemplateFailed, read_template
from producers.bulk.rows import Document, OutputRow, RowError, RowFault, RowUsage
from producers.bulk.spec import BulkSpec
from producers.bulk.split import Counter
from producers.bulk.strict_json import decode, is_text, reason
from producers.bulk.work import Work

_FENCE = re.compile(r"^```\w*\s*\n(.*)\n```$", re.DOTALL)

_CODES = {TemplateFailed: "template_failed", TooLong: "too_many_levels", NoRoom: "no_room"}

# options of which each binds the whole answer
_GRAMMARS = ("json_schema", "regex", "choice")


def prompter_of(spec: BulkSpec) -> Prompter:
    """
    What makes its prompts.

    Raises:
        SpecError: the template cannot be read, or what it needs is not in `params`.
    """
    source = read_template(spec.template) if spec.template_text is None else spec.template_text
    return Prompter(spec.template, source, spec.params)


def answer_options(spec: BulkSpec) -> Options:
    """
    The options of its jobs: where a template wants JSON or a label, the engine sees to it.

    Raises:
        SpecError: what `params` give cannot be asked of an engine.
    """
    bound = any(getattr(spec.options, name, None) is not None for name in _GRAMMARS)
    given: dict[str, Any] = {}
    # both came with the same version
    if spec.structured and not bound:
        if spec.template == "extract":
            given["json_schema"] = spec.params["schema"]
        if spec.template == "classify":
            given["choice"] = tuple(map(str, spec.params["labels"]))
    try:
        options = Options.model_validate(spec.options.model_dump(exclude_unset=True) | given)
        Job.build(prompt="probe", options=options)
    except (ValueError, InvalidJob) as error:
        where = f"params.{NEEDS[spec.template]}" if given else "options"
        raise SpecError(f"{where} cannot be used: {error}") from None
    return options


@dataclass(slots=True)
class _Spent:
    """What the jobs of a row took, added up."""

    usage: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RowUsage.model_fields, 0))

    def add(self, usage: Usage) -> None:
        for name in self.usage:
            self.usage[name] += getattr(usage, name)


class BulkTask:
    """
    Asks about each document as a spec says, long ones part by part.

    The id of a job is a hash of the bulk job, the document's custom_id, its place and all that the
    job says: a run that comes again finds what it has submitted already, and a changed prompt is
    another job.

    Args:
        batch: The batch that the jobs join.
        context_tokens: Of prompt and answer together.
        generation: Which try of the row this is; a row that has failed runs anew under another one.
    """

    def __init__(
        self, spec: BulkSpec, *, counter: Counter, batch: str | None, context_tokens: int, generation: int = 0
    ) -> None:
        self._spec, self._batch, self._generation = spec, batch, generation
        self._prompter = prompter_of(spec)
        self._options = answer_options(spec)
        self._plan = Plan(counter, spec.map_reduce, spec.template, context_tokens, self._options.max_tokens)
        self._salt = f"{spec.name}\0{spec.fingerprint()}\0{generation}"

    def work(self, document: Document) -> Work[OutputRow]:
        """The jobs for a document, level after level, and its row."""
        spent = _Spent()
        asking = self._levels(document, spent)
        # thousands wait for their answers at a time, and their other columns may be wide
        document = replace(document, text="", fields=self._kept(document))
        try:
            ends = yield from asking
        except (TemplateFailed, TooLong, NoRoom) as error:
            return self._failed(document, _CODES[type(error)], str(error), spent)
        except InvalidJob as error:
            return self._failed(document, error.code, str(error), spent)
        return self._row(document, ends, spent)

    def fault(self, fault: RowFault) -> OutputRow:
        """The row of an input row that cannot be worked on."""
        error = RowError(code=fault.code, message=fault.message)
        return OutputRow(custom_id=fault.custom_id, row=fault.row, status="failed", error=error)

    def _levels(
        self, document: Document, spent: _Spent
    ) -> Generator[Sequence[Job], Sequence[Result], Sequence[Result]]:
        """All rounds of asking; the results of the last one, or the first that have failed."""
        whole = self._prompter.messages(document, document.text)
        if self._plan.surely_fits(sum(len(message.content.encode(errors="replace")) for message in whole)):
            jobs = [self._job(document, whole, Place(), 0)]
            del document, whole
            results = yield jobs
            spent.add(results[0].usage)
            return results
        empty = self._prompter.messages(document, ".", Place("map", 1, 2))
        asking = levels(document.text, self._plan, "".join(message.content for message in empty))
        texts, level = next(asking), 0
        while True:
            places = _places(len(texts), level)
            results = yield [
                self._job(document, self._prompter.messages(document, text, place), place, level)
                for text, place in zip(texts, places, strict=True)
            ]
            for result in results:
                spent.add(result.usage)
            bad = [result for result in results if result.status != "done"]
            if bad:
                return bad[:1]
            try:
                texts, level = asking.send([result.text.strip() for result in results]), level + 1
            except StopIteration:
                return results

    def _job(self, document: Document, messages: tuple[Message, ...], place: Place, level: int) -> Job:
        spec = self._spec
        fields: dict[str, Any] = {
            "messages": messages,
            "options": self._options,
            "lane": spec.lane,
            "tenant": spec.tenant,
            "result_ttl_s": spec.result_ttl_s,
        }
        optional = {"model": spec.model, "timeout_s": spec.timeout_s, "batch": self._batch}
        job = Job.build(**fields, **{name: value for name, value in optional.items() if value is not None})
        where = f"{self._salt}\0{document.custom_id}\0{level}\0{place.part}\0"
        name = blake2b(where.encode(errors="replace") + job.body(), digest_size=16).hexdigest()
        return job.model_copy(update={"id": f"bulk-{name}"})

    def _row(self, document: Document, ends: Sequence[Result], spent: _Spent) -> OutputRow:
        last = ends[-1]
        if last.status != "done":
            return self._failed(document, *_why(last), spent, last.status, last.text or None)
        text = last.text if len(ends) == 1 else "\n\n".join(result.text.strip() for result in ends)
        reasons = [result.completions[0].finish_reason for result in ends if result.completions]
        row = OutputRow(
            custom_id=document.custom_id,
            row=document.row,
            status="done",
            text=text,
            usage=RowUsage(**spent.usage),
            finish_reason="length" if "length" in reasons else "stop",
            metadata=self._metadata(document),
        )
        if self._spec.template == "extract":
            return _with_json(row)
        return _with_label(row, self._spec.params["labels"]) if self._spec.template == "classify" else row

    def _failed(
        self,
        document: Document,
        code: str,
        message: str,
        spent: _Spent,
        status: ResultStatus = "failed",
        text: str | None = None,
    ) -> OutputRow:
        return OutputRow(
            custom_id=document.custom_id,
            row=document.row,
            status=status,
            text=text,
            error=RowError(code=code, message=message),
            usage=RowUsage(**spent.usage),
            metadata=self._metadata(document),
        )

    def _kept(self, document: Document) -> dict[str, Any]:
        return {name: document.fields[name] for name in self._spec.keep if name in document.fields}

    def _metadata(self, document: Document) -> dict[str, str]:
        values = self._kept(document)
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def _places(num_texts: int, level: int) -> list[Place]:
    if num_texts == 1 and level == 0:
        return [Place()]
    word = "map" if level == 0 else "reduce"
    return [Place(word, part, num_texts) for part in range(1, num_texts + 1)]


def _why(result: Result) -> tuple[str, str]:
    if result.failure is not None:
        return result.failure.code, result.failure.message
    return result.status, f"a job of it was {result.status}"


def _with_json(row: OutputRow) -> OutputRow:
    text = row.text or ""
    fenced = _FENCE.match(text)
    try:
        output = decode(fenced.group(1) if fenced else text)
    except (ValueError, RecursionError) as error:
        return _spoilt(row, f"the answer is not JSON: {reason(error)}")
    if not is_text(output):
        return _spoilt(row, "the answer is not JSON: an escape is half of a surrogate pair")
    made = row.model_copy(update={"output": output})
    try:
        same = OutputRow.model_validate_json(made.model_dump_json()) == made
    except ValueError:
        same = False
    # what is in a file of the output must come out of it again
    return made if same else _spoilt(row, "the answer cannot be kept: it is nested too deep, or has too large a number")


def _with_label(row: OutputRow, labels: Sequence[Any]) -> OutputRow:
    answer = row.text or ""
    found = [label for label in labels if str(label) == answer.strip()]
    found = found or [label for label in labels if _bare(str(label)) == _bare(answer)]
    return row.model_copy(update={"output": found[0]}) if found else _spoilt(row, "the answer is none of the labels")


def _bare(text: str) -> str:
    """Without what a model writes around a label."""
    return text.strip().strip(".\"'").casefold()


def _spoilt(row: OutputRow, message: str) -> OutputRow:
    return row.model_copy(update={"status": "failed", "error": RowError(code="invalid_answer", message=message)})
