"""
The plan of a bulk job, kept in its output: what a run, or a later one, works through.

`plan.chunks.jsonl` has a chunk of the input a line, `plan.tokenizer.json` what long documents are cut
with; `plan.json`, written last, says what was planned from what. A plan is made once: whoever comes
again with the same job finds it, and with another one is refused.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import chain
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pagemill.bulk_client import BulkClient
from pagemill.errors import ObjectNotFound
from pagemill.object_store import ObjectStore
from producers.bulk.chunks import Chunk
from producers.bulk.errors import BulkError, SpecError
from producers.bulk.io_errors import OutputError
from producers.bulk.locations import absolute
from producers.bulk.prompts import BUILT_IN, read_template
from producers.bulk.sources import Source, open_source
from producers.bulk.spec import FREE_FIELDS, BulkSpec
from producers.bulk.split import BYTES_A_TOKEN, Counter, Estimate, Tokens
from producers.bulk.tasks import answer_options, prompter_of
from producers.bulk.windows import windows
from producers.extras import how_to_get

P = TypeVar("P", bound=BaseModel)

PLAN, CHUNKS, TOKENIZER = "plan.json", "plan.chunks.jsonl", "plan.tokenizer.json"

# where no worker lives that could say how much its model takes
DEFAULT_CONTEXT = 4096


class Plan(BaseModel):
    """
    What is to be done.

    Args:
        num_duplicates: Rows whose custom_id an earlier row has; they become errors.
        estimated_tokens: Of all prompts and answers, as the queue would count them.
        context_tokens: Of prompt and answer together.
        generation: 0, and one more each time that failed rows are run again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    spec: BulkSpec
    source_fingerprint: str
    config_fingerprint: str
    num_chunks: int
    num_rows: int
    num_duplicates: int
    size_bytes: int
    estimated_tokens: int
    context_tokens: int
    has_tokenizer: bool
    generation: int = 0
    created_at: datetime

    @property
    def batch_base(self) -> str:
        """What the ids of its batches begin with."""
        what = f"{self.spec.name}\0{self.spec.output}\0{self.source_fingerprint}\0{self.config_fingerprint}"
        return f"bulk-{blake2b(what.encode(), digest_size=12).hexdigest()}"


def source_of(spec: BulkSpec) -> Source:
    """
    Raises:
        SettingsError: the input's URL is none.
    """
    # the templates that come with Pagemill use no other columns
    fields = spec.keep if spec.template in BUILT_IN and spec.template_text is None else None
    return open_source(
        spec.input, text_field=spec.text_field, id_field=spec.id_field, format=spec.format, fields=fields
    )


def settled(spec: BulkSpec) -> BulkSpec:
    """
    The spec as a plan has it: a template file's text and whole paths in it, as later runs may begin elsewhere.

    Raises:
        SpecError: something in it can never work; or {date} stands in a URL still.
    """
    if spec.has_date:
        raise SpecError("{date} stands in the input or output: say which day with --date")
    fields = {"input": absolute(spec.input), "output": absolute(spec.output)}
    if spec.template not in BUILT_IN and spec.template_text is None:
        fields["template_text"] = read_template(spec.template)
    spec = spec.model_copy(update=fields)
    # before the plan is made: it would keep the output from a job that is described rightly
    prompter_of(spec)
    answer_options(spec)
    return spec


def read_plan(store: ObjectStore) -> Plan | None:
    """
    The plan in an output, None where there is none.

    Raises:
        OutputError: it cannot be read.
    """
    return read_plan_of(Plan, store)


def read_plan_of(kind: type[P], store: ObjectStore) -> P | None:
    """As `read_plan`, for plans of any kind."""
    try:
        return kind.model_validate_json(store.get(store.url(PLAN)))
    except ObjectNotFound:
        return None
    except ValidationError as error:
        raise OutputError(f"{PLAN} in {store} cannot be read: {error}") from error


def write_plan(store: ObjectStore, plan: Plan) -> Plan:
    """Over the one that is there."""
    store.put(PLAN, plan.model_dump_json(indent=1, exclude_unset=True).encode() + b"\n")
    return plan


def find_or_make(spec: BulkSpec, store: ObjectStore, client: BulkClient) -> Plan:
    """
    The plan for a job with that output; reads all of the input where it is made.

    Raises:
        BulkError: the output is another job's, or the input is not the one that was planned.
        SourceError, ObjectStoreError: the input cannot be read.
    """
    found = read_plan(store)
    if found is None:
        return make_plan(spec, store, client)
    if found.config_fingerprint != spec.fingerprint():
        raise BulkError(
            f"{spec.output} has the output of a job with other settings ({_differences(found.spec, spec)}): "
            "choose another output, or clear that one"
        )
    if found.source_fingerprint != source_of(spec).fingerprint():
        raise BulkError(
            f"{spec.input} has changed since it was planned into {spec.output}: "
            "choose another output, or clear that one"
        )
    free = {name: getattr(spec, name) for name in FREE_FIELDS}
    return found.model_copy(update={"spec": found.spec.model_copy(update=free)})


def make_plan(spec: BulkSpec, store: ObjectStore, client: BulkClient) -> Plan:
    """
    Read all of the input and write a plan.

    Raises:
        OutputError: the output has files that no plan explains.
    """
    stranger = next(chain(store.list("part-"), store.list("manifest")), None)
    if stranger is not None:
        raise OutputError(f"{spec.output} has {stranger.name} and no plan: choose another output, or clear that one")
    source = source_of(spec)
    fingerprint = source.fingerprint()
    tokenizer = client.tokenizer_json(spec.model)
    if tokenizer is not None:
        store.put(TOKENIZER, tokenizer.encode())
    totals = {"num_chunks": 0, "num_rows": 0, "num_duplicates": 0, "size_bytes": 0}
    with store.open_writer(CHUNKS) as writer:
        for chunk in _limited(source.chunks(spec.rows_per_chunk), spec.limit):
            writer.write(chunk.model_dump_json().encode() + b"\n")
            amounts = (1, chunk.num_rows, len(chunk.duplicates), chunk.size_bytes)
            totals = {name: total + amount for (name, total), amount in zip(totals.items(), amounts, strict=True)}
    answers = (totals["num_rows"] - totals["num_duplicates"]) * spec.options.max_tokens
    plan = Plan(
        version=1,
        spec=spec,
        source_fingerprint=fingerprint,
        config_fingerprint=spec.fingerprint(),
        estimated_tokens=totals["size_bytes"] // BYTES_A_TOKEN + answers,
        context_tokens=spec.map_reduce.context_tokens or context_of(client, spec.model),
        has_tokenizer=tokenizer is not None,
        created_at=datetime.now(UTC),
        **totals,
    )
    return write_plan(store, plan)


def read_chunks(store: ObjectStore) -> Iterator[Chunk]:
    """
    The chunks of a plan, in order, in bounded memory.

    Raises:
        OutputError: they cannot be read.
    """
    url = store.url(CHUNKS)
    stat = store.stat(url)
    begun = b""
    try:
        for window in windows(store, url, stat.etag, 0, stat.size):
            *lines, begun = (begun + window).split(b"\n")
            yield from map(Chunk.model_validate_json, lines)
    except ValidationError as error:
        raise OutputError(f"{CHUNKS} in {store} cannot be read: {error}") from error


def counter_of(plan: Plan, store: ObjectStore) -> Counter:
    """
    What counts the tokens of long documents, the same in each run.

    Raises:
        SpecError: the plan has a tokenizer, and the library for it is not installed.
    """
    if not plan.has_tokenizer:
        return Estimate()
    try:
        return Tokens(store.get(store.url(TOKENIZER)).decode())
    except ImportError:
        about = how_to_get("tokenizers", "bulk")
        raise SpecError(f"long documents are cut by the model's tokenizer: {about}") from None


def _limited(chunks: Iterator[Chunk], limit: int | None) -> Iterator[Chunk]:
    for chunk in chunks:
        if limit is not None and chunk.first_row + chunk.num_rows >= limit:
            num_rows = limit - chunk.first_row
            duplicates = tuple(row for row in chunk.duplicates if row < limit)
            yield chunk.model_copy(update={"num_rows": num_rows, "duplicates": duplicates})
            return
        yield chunk


def context_of(client: BulkClient, model: str | None) -> int:
    """What the smallest worker of that model takes."""
    named = [fields for fields in client.workers().values() if model in (None, fields.get("model"))]
    lengths = [int(fields["max_model_len"]) for fields in named if "max_model_len" in fields]
    return min(lengths, default=DEFAULT_CONTEXT)


def _differences(one: BulkSpec, other: BulkSpec) -> str:
    first, second = (spec.model_dump(mode="json") for spec in (one, other))
    names = [name for name in first if json.dumps(first[name]) != json.dumps(second[name])]
    return ", ".join(names)
