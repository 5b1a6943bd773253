"""Prompts from templates."""

from pathlib import Path

import pytest

from pagemill.schema import Message
from producers.bulk.errors import SpecError
from producers.bulk.prompts import BUILT_IN, NEEDS, Place, Prompter, TemplateFailed, read_template
from producers.bulk.rows import Document

DOCUMENT = Document(0, "d-1", "The text.", {"title": "A title"})
PARAMS = {"labels": ["good", "bad"], "schema": {"type": "object"}, "language": "Danish"}


def prompter(name: str, **params: object) -> Prompter:
    return Prompter(name, read_template(name), params)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_ask_about_the_text(name: str) -> None:
    """
    Each has instructions for the system, and the text alone for the user.
    """
    needed = {NEEDS[name]: PARAMS[NEEDS[name]]} if name in NEEDS else {}

    system, user = prompter(name, **needed).messages(DOCUMENT, "The text.")

    assert Message(role="user", content="The text.") == user
    assert "system" == system.role
    assert "  " not in system.content
    assert "\n\n" not in system.content


def test_what_params_give_stands_in_the_prompt() -> None:
    """
    Labels, schema, language and length are told to the model.
    """
    said = {
        "classify": prompter("classify", labels=["good", "bad"]),
        "extract": prompter("extract", schema={"type": "object"}),
        "translate": prompter("translate", language="Danish", source="Irish"),
        "summarise": prompter("summarise", words=30),
    }

    system = {name: one.messages(DOCUMENT, "x")[0].content for name, one in said.items()}

    assert "good, bad" in system["classify"]
    assert '{"type": "object"}' in system["extract"]
    assert "from Irish into Danish" in system["translate"]
    assert "at most 30 words" in system["summarise"]


def test_parts_and_summaries_are_asked_about_in_their_own_words() -> None:
    """
    A part is called one, and partial summaries are not called a text.
    """
    one = prompter("summarise")

    part = one.messages(DOCUMENT, "x", Place("map", 2, 5))[0].content
    whole = one.messages(DOCUMENT, "x", Place("reduce", 1, 1))[0].content

    assert "part 2 of 5" in part
    assert "partial summaries" in whole


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    """
    It has blocks for both parts, or is all user; it sees the columns, the id and the params.
    """
    path = tmp_path / "mine.j2"
    path.write_text(
        "{% block system %}{{ tone }}{% endblock %}{% block user %}{{ fields.title }}: {{ text }}{% endblock %}"
    )
    both = Prompter("mine", read_template(str(path)), {"tone": "Be kind."})
    alone = Prompter("mine", "{{ custom_id }} {{ text | upper }}", {})

    assert ["Be kind.", "A title: x"] == [message.content for message in both.messages(DOCUMENT, "x")]
    assert ["d-1 X"] == [message.content for message in alone.messages(DOCUMENT, "x")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ fields.author }}", "author"),
        ("{{ autor }}", "'autor' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ text.__class__.__mro__ }}", "SecurityError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "OverflowError"),
        ("{{ fields.update({}) }}", "SecurityError"),
        ("  ", "gave nothing"),
    ],
)
def test_what_fails_in_a_template_is_the_rows_fault(source: str, message: str) -> None:
    """
    A missing column or a template that does what it must not is told in words, and breaks nothing else.
    """
    with pytest.raises(TemplateFailed, match=message):
        Prompter("mine", source, {}).messages(DOCUMENT, "x")


@pytest.mark.parametrize(
    ("name", "source", "params", "message"),
    [
        ("mine", "{% if %}", {}, "cannot be read at line 1"),
        ("classify", "x", {}, r"needs params\.labels"),
        ("classify", "x", {"labels": "good,bad"}, r"params\.labels is 'good,bad': want a list"),
        ("extract", "x", {"schema": {}}, r"needs params\.schema"),
        ("mine", "x", {"text": 1}, "'text', which each document gives"),
    ],
)
def test_what_can_never_work_is_told_before_any_row(
    name: str, source: str, params: dict[str, object], message: str
) -> None:
    """
    A broken template, and one whose params are missing, stop the job before it starts.
    """
    with pytest.raises(SpecError, match=message):
        Prompter(name, source, params)


def test_a_template_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    """
    The error says what can be given.
    """
    with pytest.raises(SpecError, match="give one of summarise, classify, extract, translate, or a file"):
        read_template(str(tmp_path / "none.j2"))
