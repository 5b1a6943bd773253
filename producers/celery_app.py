"""
The Celery app that other services call.

    celery -A producers.celery_app worker -Q pagemill.ingress
    celery -A producers.celery_app worker -Q pagemill.bulk --concurrency 1
    celery -A producers.celery_app beat

docs/celery.md says what each task takes and gives.
"""

from celery import Celery

from producers.tasks.config import make_app
from producers.tasks.observed import observe
from producers.tasks.settings import load_settings
from producers.tasks.steps import add_steps
from producers.tasks.tasks import register


def _build() -> Celery:
    settings = load_settings()
    made = make_app(settings)
    made.set_current()
    register(made, settings)
    add_steps(made, settings)
    observe(settings)
    return made


app = _build()
