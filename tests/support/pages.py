"""The pages of the documentation, taken apart: headings, links, and the blocks of code in them."""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"<!-- ((?:(?!-->).)*) -->\n\Z")
_LINK = re.compile(r"(?<!\\)!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# what a program of a page's prompt looks like: assignments and redirections are not it
_ASSIGNED = re.compile(r"^(?:export )?\w+=\S*$")


@dataclass(frozen=True, slots=True)
class Block:
    """
    A fenced block.

    Args:
        remark: The HTML comment in the line before it: what a test has to know and a reader need not.
    """

    page: Path
    line: int
    language: str
    code: str
    remark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def pages() -> tuple[Path, ...]:
    """All pages of the checkout."""
    found = (path for path in ROOT.rglob("*.md") if not _is_hidden(path))
    return tuple(sorted(found))


def _is_hidden(path: Path) -> bool:
    # environments, caches and what tools unpack
    parts = path.relative_to(ROOT).parts
    return any(part.startswith(".") or part in ("node_modules", "site-packages", "build", "dist") for part in parts)


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """The fenced blocks of a page, in order."""
    text = text_of(page)
    found = []
    for match in _FENCE.finditer(text):
        remark = _COMMENT.search(text[: match.start()])
        indent = len(match["indent"])
        code = "".join(line[indent:] or "\n" for line in match["code"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match["language"], code, remark.group(1) if remark else ""))
    return tuple(found)


def below(page: Path, heading: str) -> list[Block]:
    """The blocks below a heading, up to the next one of its level or a higher one."""
    bare = prose(page)
    found = re.search(rf"^(#+) {re.escape(heading)}$", bare, re.MULTILINE)
    assert found is not None, f"{page} has no heading {heading!r}"
    after = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(bare, found.end())
    first = bare.count("\n", 0, found.end()) + 1
    last = bare.count("\n", 0, after.start()) + 1 if after else math.inf
    return [block for block in blocks(page) if first < block.line < last]


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in pages() for block in blocks(page) if block.language in languages]


@cache
def prose(page: Path) -> str:
    """A page without its blocks and comments; each line stays where it is."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    return re.sub(r"<!--.*?-->", blank, _FENCE.sub(blank, text_of(page)), flags=re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """What may stand behind # in a link to the page, as GitHub names headings."""
    seen: dict[str, int] = {}
    names = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text_of(page)))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(page), re.MULTILINE):
        name = slug(heading)
        count = seen.get(name, 0)
        seen[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return frozenset(names)


def slug(heading: str) -> str:
    """A heading as GitHub turns it into an anchor."""
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Line and target of each link and picture of a page; examples in code are none."""
    for number, line in enumerate(prose(page).splitlines(), 1):
        for match in _LINK.finditer(_SPAN.sub("`code`", line)):
            yield number, match.group(1)


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Where and what: the words of each command of blocks and of code in the prose, as a shell would split them."""
    for block in blocks(page):
        if block.language in ("sh", "bash", "console"):
            for line in block.code.replace("\\\n", " ").splitlines():
                yield from ((str(block), words) for words in _split(line))
    for number, line in enumerate(prose(page).splitlines(), 1):
        where = f"{page.relative_to(ROOT)}:{number}"
        spans = [line] if re.match(r" {4}\S", line) else _SPAN.findall(line)
        for span in spans:
            yield from ((where, words) for words in _split(span))


def _split(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        # a part of a text in quotes
        words = line.split()
    one: list[str] = []
    for word in [*words, ";"]:
        if word in ("|", "&&", "||", ";", "&"):
            if one:
                yield one
            one = []
        elif one or not _ASSIGNED.match(word):
            one.append(word)
