"""Settings of the Celery side, beside those of any client."""

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

from pagemill.schema import Name
from pagemill.settings import ClientSettings


class BeatEntry(BaseModel):
    """
    When a bulk job runs.

    Args:
        name: The bulk job, as producers/bulk knows it.
        cron: Minute, hour, day of the month, month, day of the week.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    cron: str = Field(pattern=r"^\S+( \S+){4}$")


def _named(name: str) -> AliasChoices:
    # as Celery itself knows it, which reads it before anything else, or as ours
    return AliasChoices(name, f"pagemill_{name}")


class CelerySettings(ClientSettings):
    """
    What the ingress, the completer and the beat need to know.

    Args:
        celery_broker_url: Where tasks come from; CELERY_BROKER_URL is read too. Its server is not a cluster.
        celery_result_backend: Where results go, the broker if left out; CELERY_RESULT_BACKEND is read too.
        celery_result_expires_s: How long the result backend keeps results, and the queue those of `generate`.
        celery_visibility_timeout_s: A task that its worker had for so long without an acknowledgement goes to another
            worker. The shortest of all programs at a broker counts.
        celery_callback_queue: Where callbacks, errbacks and next steps go that name no queue: the callers'
            own default queue.
        celery_completer: Complete tasks on a thread of the ingress; else by `python -m producers.tasks.completer`.
        celery_reply_to: The stream of replies; one for each broker that feeds the same queue.
        celery_reply_claim_s: A reply that a completer had for so long is another one's.
        celery_batch_source: file:///folder or s3://bucket/prefix that `submit_batch` may read from; `object_store`
            if left out.
        celery_timezone: Of the beat's times and dates.
        celery_beat: Bulk jobs and when they run.
    """

    celery_broker_url: str = Field("redis://localhost:6379/1", validation_alias=_named("celery_broker_url"))
    celery_result_backend: str | None = Field(None, validation_alias=_named("celery_result_backend"))
    celery_result_expires_s: int = Field(86400, ge=60, le=30 * 86400)
    # ingress tasks take milliseconds: what was not acknowledged for so long, its worker is gone
    celery_visibility_timeout_s: float = Field(300.0, ge=1, le=86400)
    celery_callback_queue: str = "celery"
    celery_completer: bool = True
    celery_reply_to: Name = "celery"
    celery_reply_claim_s: float = Field(60.0, gt=0)
    celery_batch_source: str | None = None
    celery_timezone: str = "UTC"
    celery_beat: tuple[BeatEntry, ...] = ()

    @field_validator("celery_timezone")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError("want a name of the time zone database, like Europe/Berlin") from None
        return name


def load_settings() -> CelerySettings:
    """
    From the environment and pagemill.toml, which other programs share.

    Raises:
        SettingsError: a value is wrong, or a name nearly one of these.
    """
    return CelerySettings.load(strict=False)
