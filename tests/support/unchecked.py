"""Jobs put into the queue as a client that checks nothing would."""

from redis import Redis

from pagemill import calls
from pagemill.keys import QueueKeys


def submit_unchecked(url: str, queue: str, job_id: str, payload: bytes, **fields: object) -> None:
    """Put a payload into the queue as a client that checks nothing would."""
    submission = calls.Submission(
        job_id=job_id,
        fingerprint=job_id,
        idempotency=job_id,
        payload=payload,
        ref=str(fields.get("ref", "")),
        lane="standard",
        tenant="default",
        tokens=len(payload) // 3,
        timeout_ms=0,
        result_ttl_s=600,
        stream=0,
        seed=7,
        metadata="{}",
    )
    call = calls.submit(QueueKeys(queue), [submission], 0)
    with Redis.from_url(url) as server:
        call.parse(server.execute_command(*call.by_source))
