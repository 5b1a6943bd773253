"""The status page in a real browser: nothing that axe-core objects to, and figures that come by themselves."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagemill.client import Client
from producers.gateway.api_keys import entry, new_key
from producers.gateway.status.board import Sight
from producers.gateway.status.pages import Pages
from producers.local_redis import local_redis
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.servers import a_job, wait_for
from tests.support.services import RunningService
from tests.support.sights import batch, letter, minutes, queue, sight, survey, worker
from worker.fake_engine import FakeEngine

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")

from tests.screens.load import Load, fleet
from tests.screens.shots import LOOKS, open_page, shoot
from tests.support import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.find() is None, reason="python -m tests.support.chromium fetches a browser"),
]
DESK = LOOKS[0]
POLL_S = 15


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with local_redis() as url:
        yield url


@pytest.fixture(scope="module")
def gateway(server: str) -> Iterator[RunningGateway]:
    with (
        RunningService(server, "q", lease_s=2.0, engine=FakeEngine(tokens_per_s=4000)),
        running_gateway(server, "q") as gateway,
    ):
        yield gateway


def test_nothing_is_wrong_with_it_idle_and_under_load(browser: "Browser", tmp_path: Path) -> None:
    """
    Light and dark, on a desk and on a phone, without workers, idle and with hundreds of jobs: axe-core objects to
    nothing, and the page is as wide as its window.
    """
    with local_redis() as url, running_gateway(url, "chat") as gateway:
        found = list(shoot(browser, gateway.url, tmp_path, "empty"))
        with fleet(url, tmp_path):
            found += shoot(browser, gateway.url, tmp_path, "idle")
            with Load(url), Client(url, queue="chat") as client:
                wait_for(lambda: len(client.dead_letters()) >= 4 and client.stats().totals.get("done", 0) > 200, 90)
                found += shoot(browser, gateway.url, tmp_path, "load")

    assert 3 * len(LOOKS) == len(found)
    assert [] == [(name, objections, wider) for name, objections, wider in found if objections or wider]


class Seen:
    """A board that has seen this."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    async def sight(self) -> Sight:
        return self._sight


def test_a_crowd_and_long_names_fit(
    browser: "Browser", gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Seven queues, 150 workers, 1,000 batches, names of 128 characters; and the same when Redis has gone away.
    """
    long = "x" * 128
    seen = survey(
        queued=(10**6, 5, 123_456),
        running=10**5,
        dead=10**6,
        delayed=7,
        suspects=7,
        raw=7,
        workers={f"{long[:120]}{number:08}": worker(model=long, host=long) for number in range(150)},
        minutes=minutes(*range(0, 9 * 10**6, 10**6)),
    )
    batches = tuple(batch(f"{long[:120]}{number:08}", tenant=long, failed=3) for number in range(25))
    one = queue(long, seen, batches=batches, num_batches=1000, letters=(letter(long, tenant=long, message=long * 4),))
    others = [queue(f"queue-{number}", survey(), models=(long,), error=long) for number in range(6)]
    monkeypatch.setattr(gateway.gateway, "pages", Pages(Seen(sight(one, *others, age_s=77.0))))  # type: ignore[arg-type]

    found = list(shoot(browser, gateway.url, tmp_path, "crowd"))

    assert [] == [(name, objections, wider) for name, objections, wider in found if objections or wider]


def test_new_figures_come_by_themselves(browser: "Browser", gateway: RunningGateway, server: str) -> None:
    """
    Without a reload; what is unfolded stays so, and the focus where it was.
    """
    page = open_page(browser, gateway.url, DESK)
    with Client(server, queue="q") as client:
        client.text(client.submit(a_job()).job_id, wait_s=20)
    page.locator("#minutes summary").wait_for(timeout=1000 * POLL_S)
    page.evaluate("window.same = true")
    page.locator("#minutes summary").click()
    before = page.locator("#minutes tbody tr").first.inner_text()
    with Client(server, queue="q") as client:
        ids = [one.job_id for one in client.submit_many([a_job(f"{number}") for number in range(30)])]
        assert 30 == len(list(client.finished(ids, wait_s=30)))

    def table() -> str:
        page.wait_for_timeout(200)
        return "\n".join(page.locator("#minutes tbody tr").all_inner_texts()[:2])

    wait_for(lambda: before not in table() or "30" in table(), POLL_S)

    assert page.evaluate("window.same && document.activeElement.tagName") == "SUMMARY"
    assert page.locator("#minutes").get_attribute("open") is not None
    page.context.close()


def test_the_state_is_told_once(browser: "Browser", gateway: RunningGateway) -> None:
    """
    The live region changes with the state, and not with each look.
    """
    page = open_page(browser, gateway.url, DESK)
    page.evaluate(
        "window.changes = 0; new MutationObserver(() => window.changes++).observe("
        "document.querySelector('[role=status]'), {subtree: true, childList: true, characterData: true})"
    )
    first = page.locator("#at time").inner_text()
    wait_for(lambda: page.wait_for_timeout(200) or page.locator("#at time").inner_text() != first, POLL_S)

    assert 0 == page.evaluate("window.changes")
    page.context.close()


def test_it_goes_without_a_script(browser: "Browser", gateway: RunningGateway) -> None:
    """
    The page reloads itself then.
    """
    page = open_page(browser, gateway.url, DESK, script=False)
    first = page.locator("#at time").inner_text()

    wait_for(lambda: page.wait_for_timeout(200) or page.locator("#at time").inner_text() != first, POLL_S)
    page.context.close()


def test_browsers_have_nothing_to_refuse(browser: "Browser", gateway: RunningGateway) -> None:
    """
    Under the page's own policy nothing of it is blocked, nor missing.
    """
    context = browser.new_context()
    page, said, failed = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("response", lambda answer: failed.append(answer.url) if answer.status >= 400 else None)
    page.goto(f"{gateway.url}/")
    page.wait_for_timeout(4000)

    assert (f"{gateway.url}/status", [], []) == (page.url, said, failed)
    context.close()


def test_the_first_tab_leads_past_the_head(browser: "Browser", gateway: RunningGateway) -> None:
    """
    By keyboard: a link to the figures, that is seen once it has the focus.
    """
    page = open_page(browser, gateway.url, DESK)
    page.keyboard.press("Tab")

    link = page.locator(":focus")
    assert ("Skip to the figures", "#main") == (link.inner_text(), link.get_attribute("href"))
    box = link.bounding_box()
    assert box is not None
    assert box["y"] >= 0
    page.context.close()


def test_a_browser_asks_for_the_key(browser: "Browser", server: str, tmp_path: Path) -> None:
    """
    Given as a password it serves the page and what its script fetches.
    """
    key, path = new_key(), tmp_path / "keys.toml"
    path.write_text(entry("root", key, operator=True))
    with running_gateway(server, "q", keys_file=path) as gateway:
        context = browser.new_context(http_credentials={"username": "me", "password": key})
        page = context.new_page()
        page.goto(f"{gateway.url}/status")
        first = page.locator("#at time").inner_text()
        wait_for(lambda: page.wait_for_timeout(200) or page.locator("#at time").inner_text() != first, POLL_S)
        assert page.locator("#lost").is_hidden()
        context.close()


def test_a_gateway_that_is_gone_is_told(browser: "Browser", server: str) -> None:
    """
    The last figures stay, with a line that says so.
    """
    with running_gateway(server, "q") as gateway:
        page = open_page(browser, gateway.url, DESK)
    began = time.monotonic()

    page.locator("#lost").wait_for(state="visible", timeout=1000 * POLL_S)

    assert "The gateway does not answer" in page.locator("[role=status]").inner_text()
    assert page.locator("#now .value").count() == 6
    assert time.monotonic() - began < POLL_S
    page.context.close()
