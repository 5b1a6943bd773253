"""What the pages lead to is there: files, headings, pictures."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import ROOT, anchors, links, pages, slug, text_of

DOCS = ROOT / "docs"
ELSEWHERE = ("http://", "https://", "mailto:")


def broken(page: Path) -> Iterator[str]:
    for line, target in links(page):
        if target.startswith(ELSEWHERE):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        where = f"{page.relative_to(ROOT)}:{line}: {target}"
        if not found.exists():
            yield f"{where}: there is no such file"
        elif ROOT not in (found, *found.parents):
            yield f"{where}: lies outside of the checkout"
        elif anchor and (found.suffix != ".md" or anchor not in anchors(found)):
            yield f"{where}: there is no such heading"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_somewhere(page: Path) -> None:
    """
    A file of the checkout, and a heading in it where the link names one.
    """
    assert [] == list(broken(page))


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A file that is not there, a heading that is not there; code, blocks and escapes are no links.
    """
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# One `two` three\n\n## A, b & c\n\n## A, b & c\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[right](other.md#one-two-three) [second](other.md#a-b--c-1) [away](https://example.org/nothing)\n"
        "[wrong](gone.md) ![wrong](gone.svg) [wrong](other.md#a-b--c-2) [wrong](#nothing)\n"
        "`[no link](gone.md)` \\[no link](gone.md)\n\n```sh\n[no link](gone.md)\n```\n"
    )

    found = [line.split(": ")[1] for line in broken(page)]

    assert ["gone.md", "gone.svg", "other.md#a-b--c-2", "#nothing"] == found


def test_headings_are_named_as_github_does() -> None:
    """
    Small letters, dashes for spaces, without marks; of a link its text.
    """
    assert "gpu-one-h200-dummy-weights-bf16" == slug("GPU: one H200, dummy weights, bf16")
    assert "the-wire_format-v2" == slug("The `wire_format`, [v2](x.md)")


def test_each_page_can_be_found_from_the_first() -> None:
    """
    By following links from docs/README.md, a reader comes to each page of docs/.
    """
    reached, ahead = set[Path](), [DOCS / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached or page.suffix != ".md" or not page.is_file():
            continue
        reached.add(page)
        ahead += [(page.parent / target.partition("#")[0]).resolve() for _, target in links(page) if target[0] != "#"]

    assert set() == set(DOCS.rglob("*.md")) - reached


def test_the_map_has_every_page() -> None:
    """
    docs/README.md links each page itself: the map has no white spots.
    """
    linked = {(DOCS / target.partition("#")[0]).resolve() for _, target in links(DOCS / "README.md")}

    assert set() == set(DOCS.glob("*.md")) - {DOCS / "README.md"} - linked


@pytest.mark.parametrize("picture", sorted(DOCS.glob("images/*.svg")), ids=lambda path: path.name)
def test_a_picture_can_be_read_in_light_and_dark(picture: Path) -> None:
    """
    It is XML, says what it shows, has colours for both, takes nothing from elsewhere, and a page shows it.
    """
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    style = root.findtext(f"{space}style") or ""

    assert f"{space}svg" == root.tag
    assert {"viewBox", "role"} <= set(root.keys())
    assert root.findtext(f"{space}title")
    assert root.findtext(f"{space}desc")
    assert "prefers-color-scheme: dark" in style
    assert not {element.tag for element in root.iter()} & {f"{space}script", f"{space}image", f"{space}foreignObject"}
    assert any(f"images/{picture.name}" in text_of(page) for page in pages())
