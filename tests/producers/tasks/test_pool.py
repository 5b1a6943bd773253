"""The pool of an ingress's processes."""

from celery.concurrency import get_implementation

from producers.tasks.config import make_app
from producers.tasks.settings import CelerySettings


def test_the_size_of_a_stopped_pool_can_be_asked_for() -> None:
    """
    The loop of a worker that is shut down in the cold asks once more, and would end with an error.
    """
    app = make_app(CelerySettings(celery_broker_url="memory://"))
    pool = get_implementation(app.conf.worker_pool)(2, app=app)
    pool.start()
    running = pool.num_processes

    pool.stop()

    assert [2, 2] == [running, pool.num_processes]
