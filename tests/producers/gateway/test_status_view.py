"""What the status page says of what was seen, and that names are never markup."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pagemill.survey import NUM_MINUTES
from producers.batch_file.records import BatchRecord, RequestCounts
from producers.gateway.status import pages
from producers.gateway.status.board import FilesSight, QueueSight, Sight
from producers.gateway.status.pages import write
from producers.gateway.status.view import MAX_BATCHES, MAX_WORKERS, make_view, state_of
from tests.support.sights import NOW_MS, batch, letter, minutes, queue, sight, survey, worker

EVIL = '<script>alert("1")</script>'


class Reader(HTMLParser):
    """What a browser sees: the elements with their attributes, and the text between them."""

    def __init__(self, markup: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


ALIVE = {"w": worker()}


@pytest.mark.parametrize(
    ("seen", "tone", "text"),
    [
        (sight(queue("q", survey(workers=ALIVE))), "good", "Idle"),
        (sight(queue("q", survey(workers=ALIVE, running=3))), "good", "Working"),
        (sight(queue("q", survey(workers=ALIVE, queued=(1, 0, 0)))), "good", "Starting"),
        (sight(queue("q", survey(workers={"w": worker(state="draining")}))), "warn", "All workers are draining"),
        (sight(queue("q", survey())), "warn", "No worker is alive"),
        (sight(queue("q", survey(queued=(0, 0, 9)))), "bad", "Jobs wait, and no worker is alive"),
        (sight(queue("q", survey(raw=1))), "bad", "Jobs wait, and no worker is alive"),
        (
            sight(queue("a", survey(workers=ALIVE)), queue("b", survey(queued=(0, 0, 9)))),
            "bad",
            "Jobs wait, and no worker is alive for b",
        ),
        (
            sight(queue("q", survey(workers=ALIVE), error="away"), age_s=40.0),
            "bad",
            "The queue cannot be read: these are its last figures",
        ),
        (sight(QueueSight("q", error="away"), age_s=None), "bad", "The queue cannot be read"),
    ],
)
def test_the_worst_is_said_first(seen: Sight, tone: str, text: str) -> None:
    """
    In words without a number, so that a screen reader hears it when it changes, and only then.
    """
    state = state_of(seen)

    assert (tone, text) == (state.tone, state.text)


def test_the_large_figures_are_of_all_queues() -> None:
    """
    Two queues: what waits, runs, and ended in the last two minutes of either.
    """
    first = survey(queued=(1, 2, 3), running=4, dead=1, workers=ALIVE, minutes=minutes(60, 60))
    second = survey(queued=(0, 0, 4), running=1, workers={"x": worker(state="draining")}, minutes=minutes(60, 60))

    figures = make_view(sight(queue("a", first), queue("b", second))).figures

    assert ["10", "5", "100", "2.0", "2", "1"] == [figure.value for figure in figures]
    assert ["1k tokens, oldest 1 min 5 s", "240 in the last hour", "1 draining"] == [
        figures[place].note for place in (0, 3, 4)
    ]
    assert ["quiet", "bad"] == [figures[place].tone for place in (4, 5)]


def test_a_worker_is_shown_with_its_kv_use() -> None:
    """
    One that still loads its model has said no more than that it lives.
    """
    workers = {"old": worker(), "new": {"seen": str(NOW_MS - 500)}}

    new, old = make_view(sight(queue("q", survey(workers=workers)))).workers

    assert ("old", "pid 7 on node-1", "running", "12", "3", "72.5", "72 %") == (
        old.name,
        old.host,
        old.state,
        old.running,
        old.waiting,
        old.kv,
        old.kv_text,
    )
    assert ("1,234", "4,321", "2 s ago") == (old.tokens_per_s, old.jobs_done, old.seen)
    assert ("new", "starting", None, "-", "<1 s ago") == (new.name, new.state, new.kv, new.kv_text, new.seen)


def test_a_batch_is_shown_with_its_progress_and_its_time() -> None:
    """
    Those under way come first, then the newest; all but one is not all.
    """
    going = batch("going", total=1000, done=990, failed=9, pace=259.4, pace_at_ms=NOW_MS, pace_from_ms=NOW_MS - 600_000)
    waiting = batch("waiting", total=50, tenant="acme", created_ms=NOW_MS - 120_000)
    over = batch("over", total=2, done=2, state="ended", created_ms=NOW_MS - 1_000)
    still_open = batch("open", total=2, done=2, state="open", created_ms=NOW_MS - 180_000)

    rows = make_view(sight(queue("q", survey(), batches=(over, going, waiting, still_open)))).batches

    assert ["going", "waiting", "open", "over"] == [row.name for row in rows]
    assert ["99 %", "0 %", "100 %", "100 %"] == [row.share for row in rows]
    assert ["999 of 1,000", "0 of 50", "2 of 2", "2 of 2"] == [row.counts for row in rows]
    assert ["about 1 s", "not begun", "-", "-"] == [row.left for row in rows]
    assert ("9 failed", "acme") == (rows[0].note, rows[1].tenant)


def test_batches_of_files_are_shown_beside_them() -> None:
    """
    Half of its lines took a minute: the others take another one. Its jobs have no row of their own as long as it has.
    """
    at = NOW_MS // 1000
    record = BatchRecord(
        id="batch_1",
        endpoint="/v1/chat/completions",
        input_file_id="f",
        completion_window="24h",
        status="in_progress",
        created_at=at - 90,
        in_progress_at=at - 60,
        request_counts=RequestCounts(total=100, completed=40, failed=10),
    )

    jobs = batch("file-batch_1-0", total=100, done=50)
    seen = queue("q", survey(), batches=(jobs,))
    view = make_view(sight(seen, files=FilesSight((("acme", record),), 1)))

    [row] = view.batches
    assert 1 == view.num_batches
    assert ("batch_1", "file", "acme", "in progress") == (row.name, row.kind, row.tenant, row.state)
    assert ("50 %", "50 of 100", "10 failed", "about 1 min") == (row.share, row.counts, row.note, row.left)


def test_an_hour_is_an_hour_where_a_queue_was_not_read_for_long() -> None:
    """
    What was last seen of it is of other minutes, most of them before the hour of the queue that is read.
    """
    old = tuple(replace(minute, at_ms=minute.at_ms - 40 * 60_000) for minute in minutes(*(60,) * 61))
    view = make_view(sight(queue("a", survey(minutes=old), error="away"), queue("b", survey(minutes=minutes(60)))))

    assert NUM_MINUTES + 1 == len(view.minutes) == len(view.jobs.curves[0].values)
    assert f"{60 * (NUM_MINUTES + 1 - 40) + 60:,} in the last hour" == view.figures[3].note


def test_a_letter_tells_why_and_nothing_of_the_prompt() -> None:
    """
    A refusal quotes the value that it was given: that is cut off.
    """
    wrong = letter("raw-1", why="garbage", message="prompt: Input should be text (got ['my', 'secret'])", at_ms=NOW_MS)
    long = letter("long", message="x" * 1000, tenant="acme", lane="bulk")

    rows = make_view(sight(queue("q", survey(dead=2), letters=(wrong, long)))).letters

    assert ("raw-1", "was no job", "prompt: Input should be text") == (rows[0].job, rows[0].why, rows[0].message)
    assert ("bulk, acme", "1 min 30 s ago", 241) == (rows[1].where, rows[1].age, len(rows[1].message))


@pytest.mark.parametrize("template", ["page.html", "parts.html"])
def test_names_are_text_and_never_markup(template: str) -> None:
    """
    Of a queue's models, workers, batches, tenants, jobs and messages, whoever chose them.
    """
    seen = survey(workers={EVIL: worker(model=EVIL, host=EVIL, state=EVIL)}, dead=1, minutes=minutes(5))
    one = batch(EVIL, tenant=EVIL, done=1)
    lost = letter(EVIL, why=EVIL, message=EVIL, tenant=EVIL, lane=EVIL)
    bad = FilesSight(error=EVIL)

    whole = write(
        template,
        sight(queue(EVIL, seen, batches=(one,), letters=(lost,), models=(EVIL,), error=EVIL), queue("q"), files=bad),
    )

    read = Reader(whole)
    assert read.text.count(EVIL) >= 12
    assert [] == [one for one in read.tags("script") if "src" not in one]
    assert f"KV use of {EVIL}" in [one.get("aria-label") for one in read.tags("span")]
    assert f"Progress of {EVIL}" in [one.get("aria-label") for one in read.tags("progress")]
    assert b"<script>alert" not in whole


def test_the_page_has_nothing_inline() -> None:
    """
    No script, style or handler in the markup: the policy that browsers are told allows none.
    """
    whole = write("page.html", sight(queue("q", survey(workers=ALIVE, minutes=minutes(5)), batches=(batch(),))))

    read = Reader(whole)
    assert [] == [one for _, one in read.elements if any(name == "style" or name.startswith("on") for name in one)]
    assert [] == read.tags("style")
    [script] = read.tags("script")
    assert script["src"] == pages.static_url("status.js")


def test_a_hundred_workers_and_a_thousand_batches_are_some_rows() -> None:
    """
    As many as can be read, and how many there are.
    """
    workers = {f"w{number:04}": worker() for number in range(150)}
    batches = tuple(batch(f"b{number}", created_ms=NOW_MS - number) for number in range(100))

    seen = sight(queue("q", survey(workers=workers), batches=batches, num_batches=1000))

    view = make_view(seen)
    assert (MAX_WORKERS, 150) == (len(view.workers), view.num_workers)
    assert (MAX_BATCHES, 1000) == (len(view.batches), view.num_batches)
    text = " ".join(Reader(write("parts.html", seen)).text.split())
    assert "100 of 150" in text
    assert "25 of 1,000: those under way, then the newest" in text


def test_what_is_not_there_is_said() -> None:
    """
    No worker, no batch, no dead letter, no throughput, and a queue that was never read.
    """
    never = " ".join(Reader(write("parts.html", sight(QueueSight("q", error="away"), age_s=None))).text.split())
    assert "The queue cannot be read away" in never
    assert never.count("Not read") == 1
    assert "Nothing has been read yet." in never

    text = " ".join(Reader(write("parts.html", sight(queue("q", survey())))).text.split())
    for told in ("No worker is alive.", "There are no batches.", "No job was given up.", "No job has ended"):
        assert told in text


def test_tables_and_plots_are_told_to_those_who_listen() -> None:
    """
    Captions and scopes in every table, a title and a description in every plot, names for every bar.
    """
    seen = survey(workers=ALIVE, dead=1, minutes=minutes(5), queued=(1, 2, 3))
    read = Reader(write("page.html", sight(queue("q", seen, batches=(batch(),), letters=(letter(),)))))

    assert 5 == len(read.tags("table")) == len(read.tags("caption"))
    assert all("scope" in one for one in read.tags("th"))
    plots = [one for one in read.tags("svg") if one.get("role") == "img"]
    assert (2, 2) == (len(plots), len(read.tags("desc")))
    ids = {one.get("id") for _, one in read.elements}
    assert all(name in ids for one in plots for name in (one["aria-labelledby"] or "").split())
    assert all(one.get("aria-label") for one in read.tags("progress"))
    assert ["status"] == [one["role"] for one in read.tags("div") if one.get("role") == "status"]
    assert 1 == len(read.tags("main")) == len(read.tags("header")) == len(read.tags("footer")) == len(read.tags("h1"))
    assert [{"lang": "en"}] == read.tags("html")


def test_all_that_the_templates_name_is_there() -> None:
    """
    The files beside them, each with its kind.
    """
    folder = Path(pages.__file__).parent / "static"

    assert sorted(pages.KINDS) == sorted(path.name for path in folder.iterdir())
