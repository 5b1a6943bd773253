"""What the page says: figures of all queues as text, in the order in which they are shown."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pagemill.messages import QueueStats
from pagemill.overview import LetterHead
from pagemill.schema import LANES
from pagemill.survey import MINUTE_MS, NUM_MINUTES, Minute, Survey
from producers.gateway.status.batch_rows import BatchRow, file_rows, queue_rows
from producers.gateway.status.board import QueueSight, Sight
from producers.gateway.status.figures import ago, clock, count, duration, instant, percent, rate, short
from producers.gateway.status.plot import Plot, make_plot, shown

Tone = Literal["good", "quiet", "warn", "bad"]

MAX_WORKERS = 100
MAX_BATCHES = 25
MAX_LETTERS = 10
# a message is a line or two
MAX_MESSAGE = 240

_WHY = {
    "poison": "ended its worker twice while it ran alone",
    "retries": "all attempts failed",
    "lapses": "lost with too many workers",
    "garbage": "was no job",
}
# what a refusal says of the value that it was given: it may be a piece of a prompt
_GIVEN = re.compile(r" \(got .*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class State:
    """How things stand in a few words without figures, so that it is told aloud only when it changes."""

    tone: Tone
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the large ones."""

    name: str
    value: str
    note: str
    tone: Tone = "quiet"


@dataclass(frozen=True, slots=True)
class LaneRow:
    """`share` is of the fullest lane that is shown, from 0 to 100."""

    lane: str
    jobs: str
    tokens: str
    oldest: str
    share: str


@dataclass(frozen=True, slots=True)
class QueueCard:
    queue: str
    models: tuple[str, ...]
    lanes: tuple[LaneRow, ...]
    notes: tuple[str, ...]
    error: str


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """`kv` is the share of the KV cache in use, from 0 to 100; None where the worker has not said."""

    name: str
    host: str
    queue: str
    model: str
    state: str
    tone: Tone
    running: str
    waiting: str
    kv: str | None
    kv_text: str
    tokens_per_s: str
    jobs_done: str
    seen: str


@dataclass(frozen=True, slots=True)
class LetterRow:
    job: str
    queue: str
    kind: str
    why: str
    message: str
    at: str
    age: str
    where: str


@dataclass(frozen=True, slots=True)
class MinuteRow:
    at: str
    jobs: str
    jobs_per_s: str
    prompt_tokens: str
    completion_tokens: str
    tokens_per_s: str


@dataclass(frozen=True, slots=True)
class View:
    """
    Args:
        has_queues: More than one queue is shown, so that rows have to say theirs.
        stale: How old the figures are, where they are; else empty.
    """

    state: State
    at: str
    at_text: str
    stale: str
    figures: tuple[Figure, ...]
    tokens: Plot
    jobs: Plot
    minutes: tuple[MinuteRow, ...]
    cards: tuple[QueueCard, ...]
    has_queues: bool
    workers: tuple[WorkerRow, ...]
    num_workers: int
    batches: tuple[BatchRow, ...]
    num_batches: int
    batches_error: str
    letters: tuple[LetterRow, ...]
    num_letters: int


def make_view(sight: Sight) -> View:
    """Everything that was seen, ready to be written down."""
    surveys = {one.queue: one.overview.survey for one in sight.queues if one.overview is not None}
    minutes = shown(together([survey.minutes for survey in surveys.values()]))
    num_workers = sum(len(survey.workers) for survey in surveys.values())
    num_letters = sum(survey.stats.dead for survey in surveys.values())
    queued, files = list(queue_rows(sight)), list(file_rows(sight))
    rows = sorted([*queued, *files], key=lambda row: row.order)
    others = sum(one.overview.num_batches - len(one.overview.batches) for one in sight.queues if one.overview)
    workers = [
        _worker(queue, name, fields, survey.now_ms)
        for queue, survey in surveys.items()
        for name, fields in sorted(survey.workers.items())
    ]
    return View(
        state=state_of(sight),
        at=instant(round(sight.at_s * 1000)),
        at_text=f"{instant(round(sight.at_s * 1000))[11:19]} UTC",
        stale=_stale(sight),
        figures=_figures(surveys, minutes, num_letters),
        tokens=make_plot(
            minutes,
            {"generated tokens": lambda m: m.completion_tokens, "prompt tokens": lambda m: m.prompt_tokens},
        ),
        jobs=make_plot(minutes, {"jobs": lambda m: m.jobs}),
        minutes=tuple(map(_minute, reversed(minutes))),
        cards=_cards(sight.queues),
        has_queues=len(sight.queues) > 1,
        workers=tuple(workers[:MAX_WORKERS]),
        num_workers=num_workers,
        batches=tuple(rows[:MAX_BATCHES]),
        num_batches=len(queued) + others + max(sight.files.num_batches, len(files)),
        batches_error=sight.files.error,
        letters=_letters(sight.queues),
        num_letters=num_letters,
    )


def together(rings: Sequence[Sequence[Minute]]) -> tuple[Minute, ...]:
    """The last hour of several queues as if they were one; one that was not read for long may have older minutes."""
    sums: dict[int, Minute] = {}
    for minute in (minute for ring in rings for minute in ring):
        other = sums.get(minute.at_ms, Minute(minute.at_ms, 0.0))
        sums[minute.at_ms] = Minute(
            minute.at_ms,
            max(minute.seconds, other.seconds),
            minute.jobs + other.jobs,
            minute.prompt_tokens + other.prompt_tokens,
            minute.completion_tokens + other.completion_tokens,
        )
    first = max(sums, default=0) - NUM_MINUTES * MINUTE_MS
    return tuple(sums[at] for at in sorted(sums) if at >= first)


def state_of(sight: Sight) -> State:
    """The worst that has to be said."""
    error = sight.error or next((one.error for one in sight.queues if one.error), "")
    surveys = {one.queue: one.overview.survey for one in sight.queues if one.overview is not None}
    if error and not surveys:
        return State("bad", "The queue cannot be read", error)
    if error:
        return State("bad", "The queue cannot be read: these are its last figures", error)
    without = [queue for queue, survey in surveys.items() if not survey.workers]
    stuck = [queue for queue in without if surveys[queue].queued or surveys[queue].stats.raw]
    if stuck:
        where = "" if len(surveys) == 1 else f" for {', '.join(stuck[:5])}{' and more' if len(stuck) > 5 else ''}"
        return State("bad", f"Jobs wait, and no worker is alive{where}", _START)
    if len(without) == len(surveys):
        return State("warn", "No worker is alive", f"Nothing waits for one. {_START}")
    workers = [fields for survey in surveys.values() for fields in survey.workers.values()]
    if all(fields.get("state") == "draining" for fields in workers):
        return State("warn", "All workers are draining", "They finish what they run and take nothing new.")
    if any(survey.stats.running for survey in surveys.values()):
        return State("good", "Working")
    if any(survey.queued for survey in surveys.values()):
        return State("good", "Starting", "Jobs wait, and workers are about to take them.")
    return State("good", "Idle", "Workers are ready, and nothing waits.")


_START = "Start one: pagemill worker --model MODEL"


def _stale(sight: Sight) -> str:
    if sight.age_s is None:
        return "Nothing has been read yet."
    return f"Last read {duration(sight.age_s)} ago." if sight.age_s > 0 else ""


def _figures(surveys: Mapping[str, Survey], minutes: Sequence[Minute], num_letters: int) -> tuple[Figure, ...]:
    stats = [survey.stats for survey in surveys.values()]
    waiting = sum(survey.queued for survey in surveys.values())
    tokens = sum(survey.queued_tokens for survey in surveys.values())
    states = [fields.get("state", "starting") for survey in surveys.values() for fields in survey.workers.values()]
    oldest = max((age for survey in surveys.values() for age in survey.oldest_age_s.values()), default=0.0)
    # two minutes: the running one alone says little while it is young
    last = minutes[-2:]
    seconds = sum(minute.seconds for minute in last) or 1.0
    generated = sum(minute.completion_tokens for minute in last) / seconds
    ended = sum(minute.jobs for minute in last)
    hour = sum(minute.jobs for minute in minutes)
    delayed = sum(one.delayed for one in stats)
    return (
        Figure("Waiting", count(waiting), f"{short(tokens)} tokens, oldest {duration(oldest)}" if waiting else "jobs"),
        Figure("Running", count(sum(one.running for one in stats)), f"{count(delayed)} put off" if delayed else "jobs"),
        Figure("Tokens a second", rate(generated), "generated"),
        Figure("Jobs a second", rate(ended / seconds), f"{count(hour)} in the last hour"),
        Figure("Workers", count(len(states)), _states(states), "quiet" if states else "warn"),
        Figure("Dead letters", count(num_letters), "jobs given up", "bad" if num_letters else "quiet"),
    )


def _states(states: Sequence[str]) -> str:
    others = [f"{states.count(one)} {one}" for one in sorted(set(states)) if one != "running"]
    return ", ".join(others) if others else ("all running" if states else "none is alive")


def _cards(queues: Sequence[QueueSight]) -> tuple[QueueCard, ...]:
    stats = [one.overview.survey.stats for one in queues if one.overview is not None]
    most = max((jobs for one in stats for jobs in one.queued.values()), default=0)
    return tuple(_card(one, max(1, most)) for one in queues)


def _card(sight: QueueSight, most: int) -> QueueCard:
    if sight.overview is None:
        return QueueCard(sight.queue, sight.models, (), (), sight.error)
    survey = sight.overview.survey
    lanes = tuple(
        LaneRow(
            lane=lane,
            jobs=count(survey.stats.queued[lane]),
            tokens=short(survey.stats.queued_tokens[lane]),
            oldest=duration(survey.oldest_age_s[lane]) if survey.stats.queued[lane] else "-",
            share=f"{100 * max(0, survey.stats.queued[lane]) / most:.1f}",
        )
        for lane in LANES
    )
    return QueueCard(sight.queue, sight.models, lanes, tuple(_notes(survey.stats)), sight.error)


def _notes(stats: QueueStats) -> Iterator[str]:
    yield f"{count(stats.running)} running"
    for number, what in (
        (stats.delayed, "put off"),
        (stats.suspects, "suspects, to run apart"),
        (stats.raw, "raw entries, not adopted yet"),
    ):
        if number:
            yield f"{count(number)} {what}"


def _worker(queue: str, name: str, fields: Mapping[str, str], now_ms: int) -> WorkerRow:
    # one that still loads its model has said no more than its name
    state = fields.get("state", "starting")
    kv = min(1.0, max(0.0, float(fields["kv_usage"]))) if "kv_usage" in fields else None
    place = [f"{word} {fields[part]}" for part, word in (("pid", "pid"), ("host", "on")) if part in fields]
    return WorkerRow(
        name=name,
        host=" ".join(place),
        queue=queue,
        model=fields.get("model", "-"),
        state=state,
        tone={"running": "good", "draining": "warn"}.get(state, "quiet"),  # type: ignore[arg-type]
        running=fields.get("running", "-"),
        waiting=fields.get("waiting", "-"),
        kv=None if kv is None else f"{100 * kv:.1f}",
        kv_text="-" if kv is None else percent(kv),
        tokens_per_s=rate(float(fields["tokens_per_s"])) if "tokens_per_s" in fields else "-",
        jobs_done=count(int(fields["jobs_done"])) if "jobs_done" in fields else "-",
        seen=ago(int(fields.get("seen", now_ms)), now_ms),
    )


def _letters(queues: Sequence[QueueSight]) -> tuple[LetterRow, ...]:
    found = [
        (one.queue, letter, one.overview.survey.now_ms)
        for one in queues
        if one.overview is not None
        for letter in one.overview.letters
    ]
    found.sort(key=lambda one: -one[1].at_ms)
    return tuple(_letter(*one) for one in found[:MAX_LETTERS])


def _letter(queue: str, letter: LetterHead, now_ms: int) -> LetterRow:
    message = _GIVEN.sub("", letter.message) if letter.why == "garbage" else letter.message
    where = [part for part in (letter.lane, "" if letter.tenant == "default" else letter.tenant) if part]
    return LetterRow(
        job=letter.job_id,
        queue=queue,
        kind=letter.why,
        why=_WHY.get(letter.why, letter.why),
        message=message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…",
        at=instant(letter.at_ms),
        age=ago(letter.at_ms, now_ms),
        where=", ".join(where),
    )


def _minute(minute: Minute) -> MinuteRow:
    return MinuteRow(
        at=clock(minute.at_ms),
        jobs=count(minute.jobs),
        jobs_per_s=rate(minute.jobs / minute.seconds),
        prompt_tokens=count(minute.prompt_tokens),
        completion_tokens=count(minute.completion_tokens),
        tokens_per_s=rate(minute.completion_tokens / minute.seconds),
    )
