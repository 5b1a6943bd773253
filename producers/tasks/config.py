"""How Celery is set up, so that no task is lost and none is done twice."""

import datetime
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab

from pagemill.errors import SettingsError
from pagemill.server_url import splits_password
from producers.tasks.settings import BeatEntry, CelerySettings

INGRESS_QUEUE = "pagemill.ingress"
BULK_QUEUE = "pagemill.bulk"

# a busy queue makes tasks wait: so many are held in memory, the others stay in the broker
MAX_WAITING = 1000


def make_app(settings: CelerySettings, name: str = "pagemill") -> Celery:
    """
    A Celery app of our settings, without tasks.

    Raises:
        SettingsError: an entry of the beat is no schedule, or the URL of a server has a password that is not escaped.
    """
    app = Celery(name, set_as_current=False)
    app.conf.update(celery_config(settings))
    return app


def celery_config(settings: CelerySettings) -> dict[str, Any]:
    """Celery's own settings; raises as `make_app`."""
    for name in ("celery_broker_url", "celery_result_backend"):
        url = getattr(settings, name) or ""
        # Celery's own error would show part of it
        if url.lower().startswith(("redis://", "rediss://")) and splits_password(url):
            raise SettingsError(f"{name} has a password with a special character that is not written %xx, as / is %2F")
    visibility = {"visibility_timeout": settings.celery_visibility_timeout_s}
    # how often it is looked for what has been without an acknowledgement for too long
    looks = {"unacked_restore_interval": settings.celery_visibility_timeout_s / 10, "unacked_restore_throttle": 1}
    return {
        "broker_url": settings.celery_broker_url,
        "result_backend": settings.celery_result_backend or settings.celery_broker_url,
        "broker_connection_retry_on_startup": True,
        # without a limit: a broker that is away for an hour is no reason to end
        "broker_connection_max_retries": None,
        "broker_transport_options": visibility | looks,
        "result_backend_transport_options": visibility | {"retry_policy": {"timeout": 5.0}},
        # a worker that dies has its tasks done by another one
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        "worker_pool": "producers.tasks.pool:TaskPool",
        "worker_eta_task_limit": MAX_WAITING,
        "worker_soft_shutdown_timeout": 20.0,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "result_extended": True,
        "result_expires": settings.celery_result_expires_s,
        "task_default_queue": settings.celery_callback_queue,
        "task_routes": {"pagemill.bulk": {"queue": BULK_QUEUE}, "pagemill.*": {"queue": INGRESS_QUEUE}},
        "timezone": settings.celery_timezone,
        "beat_schedule": beat_schedule(settings.celery_beat, settings.celery_timezone),
    }


def beat_schedule(entries: tuple[BeatEntry, ...], timezone: str) -> dict[str, Any]:
    """
    Entries of the beat: each sends `pagemill.bulk` with the date of that moment, which a late worker keeps to.

    Raises:
        SettingsError: a time is none.
    """
    return {
        f"bulk:{entry.name}:{entry.cron}": {
            "task": "pagemill.bulk",
            "schedule": _crontab(entry),
            "kwargs": {"name": entry.name, "date": BeatLazyFunc(today, timezone)},
        }
        for entry in entries
    }


def _crontab(entry: BeatEntry) -> crontab:
    try:
        return crontab.from_string(entry.cron)
    except Exception as error:
        raise SettingsError(
            f"celery_beat of {entry.name} is {entry.cron!r}: {error}; want a time like 30 1 * * *"
        ) from None


def today(timezone: str) -> str:
    """The date there, in ISO's form."""
    return datetime.datetime.now(ZoneInfo(timezone)).date().isoformat()
