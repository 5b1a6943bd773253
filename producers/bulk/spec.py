"""
What a bulk job is: its input, its output, and how each document is asked about.

It comes from a section `[bulk.<name>]` of pagemill.toml, from a TOML or JSON file, and from flags,
the later over the earlier.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from pagemill.schema import Lane, Name, Options, explain
from pagemill.settings import config_file
from producers.bulk.errors import SpecError

# how fast and at what price does not change what comes out
FREE_FIELDS = frozenset({"max_jobs", "max_tokens", "deadline", "prompt_price", "completion_price"})

Fraction = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MapReduce(BaseModel):
    """What is done with a document that is longer than the model's context."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "reduce", "join", "off"] = Field(
        "auto",
        description='"reduce" asks about each part and then about the answers, until one is left; "join" writes the '
        'parts\' answers one after the other; "off" submits it as it is, to be refused or cut as `options.truncate` '
        'says; "auto" reduces for summarise, joins for translate, and is off for others.',
    )
    part_tokens: int | None = Field(
        None, ge=16, description="Most tokens of a part; unset: what fits into the context."
    )
    context_tokens: int | None = Field(
        None,
        ge=64,
        description="Of prompt and answer together; unset: the smallest worker's, and 4,096 where there is none.",
    )
    max_levels: int = Field(8, ge=1, le=32, description="Rounds of asking after which the row fails.")


class BulkSpec(BaseModel):
    """One bulk job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name = Field("bulk", description="What it is called in logs and in the ids of its jobs.")
    input: str = Field(
        description="s3:// or file:// URL of an object, or of a folder of them; {date} stands for a day."
    )
    output: str = Field(description="URL of the folder that is written; one job's alone.")
    format: Literal["jsonl", "parquet", "text"] | None = Field(
        None, description="How the input is read; unset: the names of the objects tell."
    )
    text_field: str = Field("text", description="Column of the text.")
    id_field: str = Field("custom_id", description="Column of the custom_id.")
    keep: tuple[str, ...] = Field((), description="Columns that are copied into the `metadata` of the output's rows.")
    limit: int | None = Field(
        None, ge=1, description="Rows of the input that are taken, from its beginning; unset: all."
    )
    template: str = Field(
        "summarise", description="summarise, classify, extract, translate, or the path of a template file."
    )
    template_text: str | None = Field(
        None, description="The template itself; unset: the file is read when the job is planned."
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="What the template takes: words, labels, schema, language, and what your own has.",
    )
    structured: bool = Field(
        True,
        description="Have the engine bind the answers to the schema of extract and the labels of classify (workers "
        'need the extra "structured"); else they are only asked for.',
    )
    options: Options = Field(Options(), description="As of a job: `max_tokens`, `temperature` and so on.")
    map_reduce: MapReduce = Field(MapReduce(), description="What is done with long documents; see below.")
    model: str | None = Field(None, description="The model that must answer; unset: the queue's.")
    lane: Lane = Field("bulk", description="Before whom its jobs are served.")
    tenant: Name = Field("default", description="Who pays.")
    timeout_s: float | None = Field(
        None, gt=0, le=30 * 86400, description="Of each job, from when the queue has it; unset: none."
    )
    deadline: AwareDatetime | None = Field(
        None, description="When the whole is to end: what has no answer by then has none; unset: never."
    )
    result_ttl_s: int = Field(
        2 * 86400,
        ge=60,
        le=30 * 86400,
        description="For how long answers wait in the queue for a run that was interrupted.",
    )
    rows_per_chunk: int = Field(512, ge=1, le=100_000, description="Rows of the input that make a file of the output.")
    max_jobs: int = Field(2048, ge=1, description="Most jobs in the queue at a time.")
    max_tokens: int = Field(4_000_000, ge=1, description="Most estimated tokens of them.")
    output_format: Literal["jsonl.zst", "jsonl", "parquet"] = Field(
        "jsonl.zst", description="What the files of the output are."
    )
    prompt_price: Fraction = Field(0.0, description="Of a million tokens of prompts, for the report.")
    completion_price: Fraction = Field(0.0, description="Of a million tokens of answers.")

    @field_validator("options")
    @classmethod
    def _one_answer(cls, options: Options) -> Options:
        if options.n != 1:
            raise ValueError("a row has one answer: leave n out")
        return options

    @classmethod
    def build(cls, fields: Mapping[str, Any]) -> Self:
        """
        Raises:
            SpecError: with every fault in one message.
        """
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise SpecError(f"the bulk job: {explain(error)}") from None

    def on(self, day: date) -> Self:
        """The same job with {date} put in."""
        urls = {"input": self.input, "output": self.output}
        return self.model_copy(update={name: url.replace("{date}", day.isoformat()) for name, url in urls.items()})

    def changed(self, fields: Mapping[str, Any]) -> Self:
        """
        The same job with other limits or prices.

        Raises:
            SpecError: another field would make it another job, or a value is wrong.
        """
        fixed = sorted(fields.keys() - FREE_FIELDS)
        if fixed:
            free = ", ".join(sorted(FREE_FIELDS))
            raise SpecError(f"{fixed[0]} of a job that has begun cannot be changed; {free} can")
        return self.build(self.model_dump(exclude_unset=True) | dict(fields)) if fields else self

    @property
    def has_date(self) -> bool:
        return "{date}" in self.input + self.output

    def fingerprint(self) -> str:
        """What two jobs share that give the same answers to the same input."""
        fields = self.model_dump(mode="json", exclude={"name", "output", *FREE_FIELDS})
        if self.template_text is not None:
            # the same file may lie elsewhere
            del fields["template"]
        return blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_section(name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """
    The fields of `[bulk.<name>]` in pagemill.toml.

    Raises:
        SpecError: there is no such section.
        SettingsError: PAGEMILL_CONFIG names a file that is not there.
    """
    path = config_file(environment)
    if path is None:
        raise SpecError(f"there is no pagemill.toml here that could have [bulk.{name}]: PAGEMILL_CONFIG names one")
    jobs = read_file(path).get("bulk", {})
    if not isinstance(jobs.get(name), dict):
        known = ", ".join(sorted(jobs)) or "none"
        raise SpecError(f"{path} has no [bulk.{name}]; it has {known}")
    return {"name": name, **jobs[name]}


def read_file(path: Path) -> dict[str, Any]:
    """
    A TOML or JSON file.

    Raises:
        SpecError: it is not there, or is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SpecError(f"{path} is neither TOML nor JSON: {error}") from None
    if not isinstance(fields, dict):
        raise SpecError(f"{path} holds no table of settings")
    return fields


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both, tables within them too; those of `over` count."""
    merged = dict(base)
    for name, value in over.items():
        held = merged.get(name)
        merged[name] = merge(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return merged


def assign(assignments: Sequence[str], flag: str) -> dict[str, Any]:
    """
    NAME=VALUE as fields; a value is JSON, or else a text.

    Raises:
        SpecError: there is no = in one.
    """
    fields = {}
    for one in assignments:
        name, found, value = one.partition("=")
        if not found or not re.fullmatch(r"\w+", name):
            raise SpecError(f"{flag} {one}: want NAME=VALUE")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields
