"""Files of the official client, kept in the object store."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from producers.batch_file.files import PIECE_BYTES
from tests.support.gateways import RunningGateway, running_gateway, write_keys


def test_what_was_uploaded_comes_back(client: openai.OpenAI) -> None:
    """
    Name, size and purpose are told, and the content is the same, byte by byte.
    """
    data = bytes(range(256)) * 10_000

    made = client.files.create(file=("a name.bin", data), purpose="user_data")

    assert ("file", "a name.bin", len(data), "user_data", "processed") == (
        made.object,
        made.filename,
        made.bytes,
        made.purpose,
        made.status,
    )
    assert made == client.files.retrieve(made.id)
    assert data == client.files.content(made.id).read()


def test_an_empty_file_is_one(client: openai.OpenAI) -> None:
    """
    It has no bytes, and these come back.
    """
    made = client.files.create(file=("empty", b""), purpose="batch")

    assert b"" == client.files.content(made.id).read()


def test_files_are_listed_in_pages(client: openai.OpenAI) -> None:
    """
    The newest first; the client's own paging finds all.
    """
    made = [client.files.create(file=(f"{number}", b"x"), purpose="evals").id for number in range(5)]

    listed = [one.id for one in client.files.list(purpose="evals", limit=2)]

    assert [*reversed(made)] == [name for name in listed if name in made]
    assert made == [one.id for one in client.files.list(order="asc", limit=1000) if one.id in made]


def test_a_deleted_file_is_gone(client: openai.OpenAI, gateway: RunningGateway) -> None:
    """
    Its record and its bytes.
    """
    name = client.files.create(file=("x", b"secret text"), purpose="batch").id

    assert client.files.delete(name).deleted

    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(name)
    root = Path(str(gateway.gateway.store.root))  # type: ignore[union-attr]
    assert [] == [path for path in root.rglob("*") if path.is_file() and b"secret text" in path.read_bytes()]


def test_large_uploads_take_little_memory(client: openai.OpenAI) -> None:
    """
    The parts of 48 MB pass through; what Python holds at a time is a few pieces.
    """
    piece = b"x" * (1024 * 1024)

    class Source:
        """A file that has the same megabyte 48 times."""

        name = "large"
        left = 48

        def read(self, size: int = -1) -> bytes:
            if not self.left or size == 0:
                return b""
            self.left -= 1
            return piece

        def __iter__(self) -> Iterator[bytes]:
            while data := self.read():
                yield data

    # the client itself would hold all of it: this one streams its form
    boundary = "b"
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="large"\r\n\r\n'
    ).encode()

    def form() -> Iterator[bytes]:
        yield head
        yield from Source()
        yield f"\r\n--{boundary}--\r\n".encode()

    tracemalloc.start()
    try:
        headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
        made = httpx.post(f"{client.base_url}files", content=form(), headers=headers, timeout=60).json()
        size = 0
        with httpx.stream("GET", f"{client.base_url}files/{made['id']}/content", timeout=60) as response:
            for part in response.iter_raw(PIECE_BYTES):
                size += len(part)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert (48 * 1024 * 1024,) * 2 == (made["bytes"], size)
    assert peak < 16 * 1024 * 1024


def test_files_over_size_are_413(redis_url: str, tmp_path: Path) -> None:
    """
    While they are read; nothing of them stays.
    """
    with (
        running_gateway(
            redis_url, "q", object_store=tmp_path.as_uri(), max_batches=0, max_file_bytes=100_000
        ) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
    ):
        fits = client.files.create(file=("x", b"x" * 100_000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("x", b"x" * 100_001), purpose="batch")
        with pytest.raises(openai.APIStatusError):
            client.files.create(file=("x", b"x" * 300_000), purpose="batch")
        assert [fits.id] == [one.id for one in client.files.list()]

    assert 413 == caught.value.status_code


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"purpose": "batch"}}, None),
        ({"files": {"file": b"x"}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "mischief"}}, "purpose"),
        ({"json": {"purpose": "batch"}}, None),
        ({"content": b"--b", "headers": {"content-type": "multipart/form-data"}}, None),
        ({"content": b"garbage", "headers": {"content-type": "multipart/form-data; boundary=b"}}, None),
    ],
)
def test_wrong_forms_are_400(gateway: RunningGateway, form: dict[str, object], param: str | None) -> None:
    """
    In OpenAI's shape, with the field that is wrong.
    """
    response = httpx.post(f"{gateway.url}/v1/files", **form)  # type: ignore[arg-type]

    assert (400, param) == (response.status_code, response.json()["error"]["param"])


def test_tenants_see_their_own_files(redis_url: str, tmp_path: Path) -> None:
    """
    Another's file is not there, whatever is asked of it.
    """
    keys = write_keys(tmp_path / "keys.toml", one={}, other={})
    store = (tmp_path / "objects").as_uri()
    with running_gateway(
        redis_url, "q2", object_store=store, max_batches=0, keys_file=tmp_path / "keys.toml"
    ) as gateway:
        one, other = (
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=keys[name], max_retries=0) for name in ("one", "other")
        )
        name = one.files.create(file=("x", b"x"), purpose="batch").id

        assert [] == list(other.files.list())
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(name)
        assert b"x" == one.files.content(name).read()


def test_without_a_store_there_are_no_files(redis_url: str) -> None:
    """
    Which is told, and the rest works.
    """
    with running_gateway(redis_url, "q") as gateway:
        response = httpx.post(f"{gateway.url}/v1/files", files={"file": b"x"}, data={"purpose": "batch"})

    assert (501, "no_object_store") == (response.status_code, response.json()["error"]["code"])
