"""Results of the last seconds: kept for a while, and no more of them than fit."""

from pagemill.messages import Finished
from tests.support.clock import Clock
from tests.support.deliveries import delivery
from tests.support.servers import result_of
from worker.written import MAX_RESULTS, Written


def finished(name: str, payload: bytes = b"{}") -> Finished:
    job = delivery(b"the job", job_id=name, checkpoint=b"1234")
    return Finished(job, result_of(job), payload)


def names(written: Written, *, everything: bool = False) -> list[str]:
    return [kept.finished.delivery.job_id for kept in written.let_go(everything=everything)]


def test_a_result_is_kept_for_its_time() -> None:
    """
    What is young stays, what is old is given out once, in order.
    """
    clock = Clock()
    written = Written(keep_s=10.0, clock=clock)
    for now, name in ((0.0, "a"), (4.0, "b"), (8.0, "c")):
        clock.now = now
        written.keep(finished(name), "done")
    clock.now = 14.5

    assert [["a", "b"], [], ["c"], []] == [
        names(written),
        names(written),
        names(written, everything=True),
        names(written, everything=True),
    ]


def test_results_are_bounded_by_number_and_size() -> None:
    """
    More than fit make the oldest go before its time.
    """
    many, large = Written(clock=Clock()), Written(clock=Clock())
    for number in range(MAX_RESULTS + 2):
        many.keep(finished(str(number)), "done")
    for number in range(3):
        large.keep(finished(str(number), b"x" * (16 << 20)), "done")

    assert (["0", "1"], ["0"]) == (names(many), names(large))


def test_only_what_is_sent_is_kept() -> None:
    """
    Neither the job's payload nor the answers apart from the result's own bytes take memory.
    """
    written = Written(clock=Clock())
    written.keep(finished("a", b'{"all": 1}'), "done")
    [kept] = written.let_go(everything=True)
    slim = kept.finished

    assert (b'{"all": 1}', None, b"", ()) == (
        slim.payload,
        slim.delivery.payload,
        slim.delivery.checkpoint,
        slim.result.completions,
    )
    assert 2 == slim.result.usage.completion_tokens
