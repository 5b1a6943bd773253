"""What a bulk job came to: rows, tokens, cost, time, and what went wrong."""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from producers.bulk.manifest import Manifest
from producers.bulk.rows import RowUsage
from producers.bulk.spec import BulkSpec

_MILLION = 1_000_000


class Summary(BaseModel):
    """
    The figures of a job that is done.

    Args:
        errors: Rows without an answer, by code.
        cost: In the currency of the prices; None where no price is set.
        elapsed_s: From the plan, or the start of a rerun, to the end; times between runs count too.
        tokens_per_s: None after a rerun, whose time is not that of all tokens.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    output: str
    num_rows: int
    num_done: int
    num_failed: int
    errors: dict[str, int]
    usage: RowUsage
    cost: float | None
    elapsed_s: float
    tokens_per_s: float | None
    generation: int
    started_at: datetime
    ended_at: datetime


def cost_of(spec: BulkSpec, usage: RowUsage) -> float | None:
    if not spec.prompt_price and not spec.completion_price:
        return None
    whole = usage.prompt_tokens * spec.prompt_price + usage.completion_tokens * spec.completion_price
    return round(whole / _MILLION, 6)


def details_of(spec: BulkSpec, errors: Mapping[str, int], generation: int) -> dict[str, Any]:
    """What a manifest keeps of a job besides its shards."""
    return {
        "spec": spec.model_dump(mode="json", exclude_unset=True),
        "errors": dict(sorted(errors.items())),
        "generation": generation,
    }


def summarise(manifest: Manifest) -> Summary:
    """The figures, from the manifest alone."""
    spec = BulkSpec.build(manifest.details["spec"])
    elapsed_s = max((manifest.ended_at - manifest.started_at).total_seconds(), 0.001)
    generation = manifest.details["generation"]
    tokens = manifest.usage.prompt_tokens + manifest.usage.completion_tokens
    return Summary(
        name=spec.name,
        output=spec.output,
        num_rows=manifest.num_rows,
        num_done=manifest.num_rows - manifest.num_failed,
        num_failed=manifest.num_failed,
        errors=manifest.details["errors"],
        usage=manifest.usage,
        cost=cost_of(spec, manifest.usage),
        elapsed_s=round(elapsed_s, 3),
        tokens_per_s=None if generation else round(tokens / elapsed_s, 1),
        generation=generation,
        started_at=manifest.started_at,
        ended_at=manifest.ended_at,
    )


def lines(summary: Summary) -> Iterator[str]:
    """The report for people."""
    usage = summary.usage
    yield f"output    {summary.output}"
    yield f"rows      {summary.num_rows:,}: done {summary.num_done:,}, without an answer {summary.num_failed:,}"
    for code, number in Counter(summary.errors).most_common():
        yield f"          {number:,} {code}"
    cached = f" ({usage.cached_tokens:,} of them found in the cache)" if usage.cached_tokens else ""
    yield f"tokens    {usage.prompt_tokens:,} of prompts{cached}, {usage.completion_tokens:,} of answers"
    if summary.cost is not None:
        yield f"cost      {summary.cost:,.4f}"
    rate = "" if summary.tokens_per_s is None else f", {summary.tokens_per_s:,.0f} tokens a second"
    yield f"time      {summary.elapsed_s:,.1f} s{rate}"
    if summary.generation:
        yield f"reruns    {summary.generation} of rows that had failed"
