"""The tokenizer that a queue shows to its producers."""

import random
from collections.abc import Iterator

import pytest
from redis import Redis

from pagemill import shown_tokenizer
from pagemill.bulk_client import BulkClient
from pagemill.keys import QueueKeys
from pagemill.shown_tokenizer import SHOWN_S, pack, unpack
from tests.support.servers import MakeConsumer, wait_for
from tests.support.services import RunningService
from worker.fake_engine import ByteTokenizer


@pytest.fixture
def client(server_url: str, queue: str) -> Iterator[BulkClient]:
    with BulkClient(server_url, queue=queue) as client:
        yield client


def test_it_is_there_for_a_while(client: BulkClient, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    What a worker shows can be read, until nobody has shown it for ten minutes.
    """
    assert client.tokenizer_json() is None
    worker = consumer()
    packed = pack('{"model": "é"}')
    assert packed is not None

    worker.run(worker.consumer.tokenizer.show(packed))

    assert '{"model": "é"}' == client.tokenizer_json()
    assert 0 < redis.ttl(QueueKeys(queue).tokenizer) <= SHOWN_S


def test_it_is_sent_once_and_kept_up(client: BulkClient, consumer: MakeConsumer, redis: Redis, queue: str) -> None:
    """
    Showing the same again only prolongs it; another one takes its place, and a lost one is sent again.
    """
    worker, key = consumer(), QueueKeys(queue).tokenizer
    one, other = pack("one"), pack("other")
    assert one is not None
    assert other is not None
    worker.run(worker.consumer.tokenizer.show(one))
    redis.hset(key, "z", other)
    redis.expire(key, 5)

    worker.run(worker.consumer.tokenizer.show(one))
    assert ("other", True) == (client.tokenizer_json(), redis.ttl(key) > 5)
    worker.run(worker.consumer.tokenizer.show(other))
    assert "other" == client.tokenizer_json()
    redis.delete(key)
    worker.run(worker.consumer.tokenizer.show(one))
    assert "one" == client.tokenizer_json()


def test_one_that_is_too_large_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The queue's server holds no more of it than a bound; what is packed comes out as it was.
    """
    noise = random.Random(1).randbytes(2000).hex()
    packed = pack(noise)
    assert packed is not None
    assert noise == unpack(packed)
    monkeypatch.setattr(shown_tokenizer, "MAX_BYTES", 100)

    assert pack(noise) is None


def test_a_worker_shows_its_own(client: BulkClient, server_url: str, queue: str) -> None:
    """
    Soon after its start the tokenizer of its engine can be read, also by the model's name.
    """
    with RunningService(server_url, queue):
        shown = wait_for(client.tokenizer_json)

    assert ByteTokenizer().to_json() == shown
