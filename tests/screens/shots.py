"""Pictures of the status page, and what axe-core finds wrong with it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page


@dataclass(frozen=True, slots=True)
class Look:
    """How somebody looks at the page."""

    scheme: str
    width: int
    height: int

    @property
    def name(self) -> str:
        return f"{self.scheme}-{'phone' if self.width < 640 else 'desk'}"


LOOKS = [Look(scheme, *size) for scheme, size in itertools.product(("light", "dark"), ((1280, 900), (390, 844)))]


def open_page(browser: Browser, url: str, look: Look, *, script: bool = True) -> Page:
    """The page, as soon as all of it is there."""
    context = browser.new_context(
        viewport={"width": look.width, "height": look.height},
        color_scheme=look.scheme,  # type: ignore[arg-type]
        java_script_enabled=script,
        device_scale_factor=1,
    )
    page = context.new_page()
    page.goto(f"{url}/status", wait_until="load")
    return page


def violations(page: Page) -> list[str]:
    """What axe-core objects to, with the elements; its best practices are rules too."""
    found: list[dict[str, Any]] = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:160]}" for one in found for node in one["nodes"]]


def overflow(page: Page) -> int:
    """Pixels that the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def shoot(browser: Browser, url: str, folder: Path, name: str) -> Iterator[tuple[str, list[str], int]]:
    """A picture of each look, kept in the folder; its name, axe's objections and the overflow."""
    for look in LOOKS:
        page = open_page(browser, url, look)
        try:
            page.screenshot(path=folder / f"{name}-{look.name}.png", full_page=True)
            yield f"{name}-{look.name}", violations(page), overflow(page)
        finally:
            page.context.close()
