"""Any input is planned once as a stream, and any chunk of it is read again alone."""

import gzip
import os
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
import zstandard

from pagemill.errors import ObjectChanged, SettingsError
from producers.bulk.chunks import Chunk
from producers.bulk.io_errors import SourceError
from producers.bulk.rows import Document, RowFault
from producers.bulk.sources import open_source
from tests.support.bulk_inputs import (
    FORMATS,
    Save,
    counted_ranges,
    documents,
    jsonl,
    read_all,
    save_gzip,
    save_jsonl,
    save_parquet,
    save_zstd,
)


@pytest.mark.parametrize("save", FORMATS)
@pytest.mark.parametrize("rows_per_chunk", [1, 10, 100, 1000])
def test_what_is_planned_is_read(tmp_path: Path, save: Save, rows_per_chunk: int) -> None:
    """
    In every format, the chunks in order are all rows in order, each once, with all their columns.
    """
    rows = documents(203)
    source = open_source(str(save(tmp_path, rows)))

    chunks = list(source.chunks(rows_per_chunk))

    sizes = [rows_per_chunk] * (203 // rows_per_chunk) + [203 % rows_per_chunk] * bool(203 % rows_per_chunk)
    assert sizes == [chunk.num_rows for chunk in chunks]
    expected = [Document(row, f"id-{row}", str(one["text"]), {"n": row}) for row, one in enumerate(rows)]
    assert expected == read_all(source, chunks)


@pytest.mark.parametrize("save", FORMATS)
def test_a_chunk_is_read_alone(tmp_path: Path, save: Save) -> None:
    """
    Chunks that went through JSON, read in any order, some twice, some to the middle, by another source, have the
    same rows.
    """
    path = save(tmp_path, documents(203))
    source = open_source(str(path))
    chunks = list(source.chunks(20))
    in_order = {chunk.index: list(source.read(chunk)) for chunk in chunks}
    again = open_source(path.as_uri())
    rng = random.Random(1)

    for chunk in rng.choices(chunks, k=40):
        reading = again.read(Chunk.model_validate_json(chunk.model_dump_json()))
        if rng.random() < 0.3:
            assert in_order[chunk.index][0] == next(reading)
        else:
            assert in_order[chunk.index] == list(reading)


@pytest.mark.parametrize("save", FORMATS)
def test_chunks_are_read_by_several_threads(tmp_path: Path, save: Save) -> None:
    """
    One source reads many chunks at the same time.
    """
    source = open_source(str(save(tmp_path, documents(203))))
    chunks = list(source.chunks(5))
    expected = [list(source.read(chunk)) for chunk in chunks]

    with ThreadPoolExecutor(4) as threads:
        assert expected == list(threads.map(lambda chunk: list(source.read(chunk)), chunks))


@pytest.mark.parametrize("save", FORMATS)
def test_small_windows(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where windows of the object end changes nothing.
    """
    path = save(tmp_path, documents(20))
    whole = read_all(open_source(str(path)), list(open_source(str(path)).chunks(7)))
    for window in (1, 13, 100):
        monkeypatch.setattr("producers.bulk.windows.WINDOW_BYTES", window)
        monkeypatch.setattr("producers.bulk.windows._UNPACKED_BYTES", window)
        source = open_source(str(path))

        assert whole == read_all(source, list(source.chunks(7)))


@pytest.mark.parametrize("save", FORMATS)
def test_an_input_that_has_changed_is_found_out(tmp_path: Path, save: Save) -> None:
    """
    A chunk of an object that was written anew since the plan is an error, not other rows; its fingerprint is another.
    """
    path = save(tmp_path, documents(50))
    source = open_source(str(path))
    chunks = list(source.chunks(10))
    fingerprint = source.fingerprint()
    assert fingerprint == open_source(path.as_uri()).fingerprint()

    save(tmp_path, documents(50, seed=1))

    with pytest.raises(ObjectChanged):
        list(source.read(chunks[2]))
    assert fingerprint != source.fingerprint()


def test_how_an_input_is_read_is_part_of_its_fingerprint(tmp_path: Path) -> None:
    """
    Another column, limit or format makes another plan.
    """
    path = str(save_jsonl(tmp_path, documents(3)))
    ways: list[dict[str, object]] = [
        {},
        {"text_field": "n"},
        {"id_field": "n"},
        {"max_line_bytes": 9},
        {"format": "text"},
    ]

    assert len(ways) == len({open_source(path, **way).fingerprint() for way in ways})  # type: ignore[arg-type]


@pytest.mark.parametrize("save", FORMATS)
def test_ids_that_come_again_are_faults_of_the_later_rows(tmp_path: Path, save: Save) -> None:
    """
    The first row of an id is worked on, in whichever chunk, and the others are told that they come late.
    """
    rows = documents(100)
    rows[50]["custom_id"] = rows[51]["custom_id"] = rows[99]["custom_id"] = "id-7"
    rows[60]["custom_id"] = None
    rows[61]["custom_id"] = "row-60"
    source = open_source(str(save(tmp_path, rows)))
    chunks = list(source.chunks(9))

    found = read_all(source, chunks)

    late = [(item.row, item.custom_id) for item in found if isinstance(item, RowFault)]
    assert [(50, "id-7"), (51, "id-7"), (61, "row-60"), (99, "id-7")] == late
    assert {"duplicate_custom_id"} == {item.code for item in found if isinstance(item, RowFault)}
    assert 100 == len(found)


def test_many_small_objects_share_chunks(tmp_path: Path) -> None:
    """
    A chunk may have rows of several objects, each with a mark at its beginning and blank lines at its end; their
    numbers run through, and duplicates are found across.
    """
    for number in range(10):
        rows = [{"custom_id": f"{number}-{row}", "text": "t"} for row in range(7)]
        (tmp_path / f"{number}.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl(rows) + b"\n\n")
    (tmp_path / "9.jsonl").write_bytes(jsonl([{"custom_id": "0-0", "text": "t"}]))
    source = open_source(str(tmp_path))

    chunks = list(source.chunks(16))

    assert [16, 16, 16, 16] == [chunk.num_rows for chunk in chunks]
    assert [3, 3, 3, 4] == [len(chunk.pieces) for chunk in chunks]
    found = read_all(source, chunks)
    assert list(range(64)) == [item.row for item in found]
    assert [63] == [item.row for item in found if isinstance(item, RowFault)]


@pytest.mark.parametrize("save", FORMATS)
def test_a_chunk_has_an_end_in_bytes(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Few large rows make a chunk, so that what is read for one is bounded.
    """
    monkeypatch.setattr("producers.bulk.sources.MAX_CHUNK_BYTES", 10_000)
    rng = random.Random(0)
    source = open_source(str(save(tmp_path, [{"text": rng.randbytes(2000).hex()} for _ in range(10)])))

    chunks = list(source.chunks(100))

    assert [3, 3, 3, 1] == [chunk.num_rows for chunk in chunks]
    assert 40_000 < sum(chunk.size_bytes for chunk in chunks) < 50_000


def test_a_folder_of_texts(tmp_path: Path) -> None:
    """
    Each file below a folder is a document that is named by its path; a mark is no text, and what is no text is a
    fault.
    """
    texts = {
        "a.txt": "\ufeffone\r\ntwo".encode(),
        "deep/er/é.md": b"drei\n",
        "deep/b.TXT": b"\xff",
        "e.txt": b"",
    }
    texts |= {"long.txt": b"x" * 101, ".hidden.txt": b"x", "_marks/x.txt": b"x", "blank.md": b" \n"}
    for name, data in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    source = open_source(str(tmp_path), max_line_bytes=100)

    found = read_all(source, list(source.chunks(2)))

    assert {
        "a.txt": "one\r\ntwo",
        "deep/er/é.md": "drei\n",
        "deep/b.TXT": "invalid_encoding",
        "e.txt": "empty_text",
        "long.txt": "line_too_long",
        "blank.md": "empty_text",
    } == {str(item.custom_id): item.text if isinstance(item, Document) else item.code for item in found}
    assert list(range(6)) == [item.row for item in found]


def test_patterns(tmp_path: Path) -> None:
    """
    A star stops at a slash, two do not; brackets are one of their characters.
    """
    for name in ("a1.txt", "a2.txt", "b1.txt", "deep/a1.txt", "deep/er/a1.txt", "a1.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(pattern: str) -> set[str | None]:
        source = open_source(f"{tmp_path}/{pattern}")
        return {item.custom_id for item in read_all(source, list(source.chunks(10)))}

    assert {"a1.txt", "a2.txt", "b1.txt"} == names("*.txt")
    assert {"a1.txt", "a2.txt"} == names("a[12].txt")
    assert {"a1.txt", "deep/a1.txt", "deep/er/a1.txt"} == names("**/a1.txt")
    assert {"a1.txt", "er/a1.txt"} == names("deep/**")
    assert {"a1.txt"} == names("deep/*.txt")


def test_a_file_that_is_called_like_a_pattern(tmp_path: Path) -> None:
    """
    What is there under the very name is meant.
    """
    (tmp_path / "a[1].txt").write_text("this")
    (tmp_path / "a1.txt").write_text("not this")
    source = open_source(str(tmp_path / "a[1].txt"))

    assert [Document(0, "a[1].txt", "this")] == read_all(source, list(source.chunks(10)))


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """
    A file whose name is no UTF-8 is read, and its id tells the bytes.
    """
    with open(os.path.join(os.fsencode(tmp_path), b"a\xff.txt"), "wb") as file:
        file.write(b"text")
    source = open_source(str(tmp_path))

    (item,) = read_all(source, list(source.chunks(1)))

    assert ("text", "a\\udcff.txt") == (item.text if isinstance(item, Document) else "", item.custom_id)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no object"),
        ([".hidden.jsonl", "_SUCCESS"], "no object"),
        (["a.csv"], r"a\.csv is not known"),
        (["a.jsonl", "README.md"], "lie together"),
    ],
)
def test_an_input_that_is_none(tmp_path: Path, names: list[str], message: str) -> None:
    """
    A folder without anything to read, or with what is not known, is refused, rather than read in part.
    """
    for name in names:
        (tmp_path / name).write_bytes(b'{"text": "a"}\n')

    with pytest.raises(SourceError, match=message):
        list(open_source(str(tmp_path)).chunks(10))


def test_a_format_that_is_said(tmp_path: Path) -> None:
    """
    A name says nothing where the job says it.
    """
    (tmp_path / "in.csv").write_bytes(b'{"text": "a"}\n')
    source = open_source(str(tmp_path / "in.csv"), format="jsonl")

    assert [Document(0, "row-0", "a")] == read_all(source, list(source.chunks(10)))
    with pytest.raises(SettingsError, match="want one of jsonl"):
        open_source(str(tmp_path), format="csv")
    with pytest.raises(SettingsError, match="object store"):
        open_source("http://host/in.jsonl")


@pytest.mark.parametrize("save", [save_gzip, save_zstd, save_parquet])
@pytest.mark.parametrize("fault", ["cut", "damaged"])
def test_a_file_that_is_not_whole(tmp_path: Path, save: Save, fault: str) -> None:
    """
    A packed file that ends in the middle, or was damaged, is no input with fewer rows, but an error.
    """
    path = save(tmp_path, documents(500))
    data = bytearray(path.read_bytes().rstrip(b"\0"))
    if fault == "cut":
        del data[-20:]
    else:
        middle = len(data) // 2 if save is not save_parquet else len(data) - 30
        data[middle : middle + 20] = b"?" * 20
    path.write_bytes(data)

    with pytest.raises(SourceError, match=path.name):
        list(open_source(str(path)).chunks(10))


def test_a_bomb_is_unpacked_in_bounded_memory(tmp_path: Path) -> None:
    """
    A line of 80 MB in a small file is one fault.
    """
    with gzip.open(tmp_path / "in.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(80):
            file.write(b"x" * 1_000_000)
    (tmp_path / "in2.jsonl.zst").write_bytes(zstandard.ZstdCompressor(level=1).compress(b"x" * 80_000_000))
    source = open_source(str(tmp_path))

    tracemalloc.start()
    (first, second) = read_all(source, list(source.chunks(10)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert ["80,000,000 bytes"] * 2 == [
        str(item.message).partition(":")[0] for item in (first, second) if isinstance(item, RowFault)
    ]
    assert peak < 60_000_000


@pytest.mark.parametrize("save", FORMATS)
def test_chunks_in_order_are_one_way_through_the_input(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    However many chunks an input has, reading them in order fetches it about once.
    """
    path = save(tmp_path, documents(2000))
    source = open_source(str(path))
    chunks = list(source.chunks(50))
    sizes = counted_ranges(source, monkeypatch)

    # as a job does, which counts rows and takes no more
    for chunk in chunks:
        assert chunk.num_rows == len(list(islice(source.read(chunk), chunk.num_rows)))

    assert sum(sizes) < 1.5 * path.stat().st_size + 70_000
