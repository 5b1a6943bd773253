"""Lines become documents, or faults that say why."""

import json

import pytest

from producers.bulk.columns import Columns
from producers.bulk.jsonl import rows_of
from producers.bulk.rows import Document, RowFault


def read(data: bytes, window: int = 1_000_000, **columns: object) -> list[Document | RowFault]:
    windows = (data[start : start + window] for start in range(0, len(data), window))
    return [item for item, _ in rows_of(windows, Columns(**columns), 0, 0)]  # type: ignore[arg-type]


def test_a_document_has_its_id_its_text_and_the_rest() -> None:
    """
    Columns beside the text and the id are kept as they are.
    """
    line = b'{"custom_id": "a", "text": "hello", "year": 1999, "tags": ["x", {"y": null}]}\n'

    assert [Document(0, "a", "hello", {"year": 1999, "tags": ["x", {"y": None}]})] == read(line)


def test_columns_may_have_other_names() -> None:
    """
    The text and the id are in the columns that the job names.
    """
    assert [Document(0, "7", "hello", {"text": 1})] == read(
        b'{"key": 7, "body": "hello", "text": 1}', id="key", text="body"
    )


def test_a_row_without_an_id_is_named_by_its_number() -> None:
    """
    No id, or null, is a number; the number is the row's.
    """
    rows = read(b'{"text": "a"}\n{"custom_id": null, "text": "b"}\n')

    assert ["row-0", "row-1"] == [row.custom_id for row in rows]


@pytest.mark.parametrize("window", [1, 2, 3, 7, 1000])
def test_marks_and_ends_of_windows_systems_are_nothing(window: int) -> None:
    """
    A byte order mark, CRLF and a last line without an end change no row; separators in the text stay in it.
    """
    text = "a\u2028b\u0085é😀"
    data = f'\ufeff{{"text": "{text}"}}\r\n{{"text": "{text}2"}}'.encode()

    assert [Document(0, "row-0", text), Document(1, "row-1", f"{text}2")] == read(data, window)


def test_blank_lines_between_rows_are_faults_and_behind_them_nothing() -> None:
    """
    A blank line in the middle takes a number, as the row that may have been there would.
    """
    rows = read(b'\n{"text": "a"}\n  \r\n\n{"text": "b"}\n\n \r\n\n')

    assert [(0, "blank_line"), (1, ""), (2, "blank_line"), (3, "blank_line"), (4, "")] == [
        (row.row, row.code if isinstance(row, RowFault) else "") for row in rows
    ]


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_nothing_has_no_rows(data: bytes) -> None:
    """
    An empty file has no rows, also with a mark.
    """
    assert [] == read(data)


@pytest.mark.parametrize(
    ("line", "code", "custom_id"),
    [
        (b"{", "invalid_json", None),
        (b'{"text": "a"} {"text": "b"}', "invalid_json", None),
        (b"{'text': 'a'}", "invalid_json", None),
        (b'{"text": NaN}', "invalid_json", None),
        (b'{"text": "a", "n": -Infinity}', "invalid_json", None),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "invalid_json", None),
        (b'{"text": "a", "n": ' + b"[" * 100_000, "invalid_json", None),
        (b'{"text": "a\x01"}', "invalid_json", None),
        (b'["text"]', "not_an_object", None),
        (b'"text"', "not_an_object", None),
        (b"null", "not_an_object", None),
        (b'{"custom_id": "a"}', "missing_text", "a"),
        (b'{"custom_id": "a", "text": null}', "missing_text", "a"),
        (b'{"custom_id": "a", "text": 7}', "missing_text", "a"),
        (b'{"custom_id": "a", "text": ["x"]}', "missing_text", "a"),
        (b'{"custom_id": "a", "text": ""}', "empty_text", "a"),
        (b'{"custom_id": "a", "text": " \\n\\u2003"}', "empty_text", "a"),
        (b'{"custom_id": "", "text": "a"}', "invalid_custom_id", None),
        (b'{"custom_id": 1.5, "text": "a"}', "invalid_custom_id", None),
        (b'{"custom_id": true, "text": "a"}', "invalid_custom_id", None),
        (b'{"custom_id": "' + b"x" * 513 + b'", "text": "a"}', "invalid_custom_id", None),
        (b'{"text": "\xff"}', "invalid_encoding", None),
        (b'{"text": "\xed\xa0\x80"}', "invalid_encoding", None),
        (b'{"text": "\\ud800"}', "invalid_encoding", None),
        (b'{"text": "a", "\\udfff": 1}', "invalid_encoding", None),
        (b'{"text": "' + b"x" * 5_000_000 + b'"}', "line_too_long", None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_with_a_row(line: bytes, code: str, custom_id: str | None) -> None:
    """
    Each fault has a code, costs its own row alone, and its message holds nothing of the row.
    """
    before, broken, after = read(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n', window=65536)

    assert isinstance(broken, RowFault)
    assert (1, code, custom_id) == (broken.row, broken.code, broken.custom_id)
    assert len(broken.message) < 200
    assert (Document(0, "row-0", "one"), Document(2, "row-2", "two")) == (before, after)


def test_escapes_of_whole_pairs_are_text() -> None:
    """
    A character beyond the first 65,536, written as two escapes, is that character.
    """
    assert "😀" in json.loads(json.dumps("😀"))
    assert [Document(0, "row-0", "😀")] == read(b'{"text": "\\ud83d\\ude00"}')


def test_a_line_of_20_megabytes() -> None:
    """
    A line that is far too long is one fault, and the rows around it are read.
    """
    rows = read(b'{"text": "a"}\n{"text": "' + b"x" * 20_000_000 + b'"}\n{"text": "b"}', window=1 << 20)

    assert ["a", "line_too_long", "b"] == [row.text if isinstance(row, Document) else row.code for row in rows]
    assert "20,000,012 bytes: want no more than 4,194,304" in str(rows[1])
