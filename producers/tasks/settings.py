"""Settings of the Celery side, beside those of any client."""

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

from pagemill.schema import Name
from pagemill.settings import ClientSettings


class BeatEntry(BaseModel):
    """When a bulk job runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name = Field(description="The bulk job, as `[bulk.<name>]` of pagemill.toml has it.")
    cron: str = Field(pattern=r"^\S+( \S+){4}$", description="Minute, hour, day of the month, month, day of the week.")


def _named(name: str) -> AliasChoices:
    # as Celery itself knows it, which reads it before anything else, or as ours
    return AliasChoices(name, f"pagemill_{name}")


class CelerySettings(ClientSettings):
    """What the ingress, the completer and the beat need to know."""

    celery_broker_url: str = Field(
        "redis://localhost:6379/1",
        validation_alias=_named("celery_broker_url"),
        description="Where tasks come from; CELERY_BROKER_URL is read too. Its server is not a cluster.",
    )
    celery_result_backend: str | None = Field(
        None,
        validation_alias=_named("celery_result_backend"),
        description="Where results go; CELERY_RESULT_BACKEND is read too; unset: to the broker.",
    )
    celery_result_expires_s: int = Field(
        86400,
        ge=60,
        le=30 * 86400,
        description="How long the result backend keeps results, and the queue those of `generate`.",
    )
    # ingress tasks take milliseconds: what was not acknowledged for so long, its worker is gone
    celery_visibility_timeout_s: float = Field(
        300.0,
        ge=1,
        le=86400,
        description="A task that its worker had for so long without an acknowledgement goes to another one. The "
        "shortest of all programs at a broker counts.",
    )
    celery_callback_queue: str = Field(
        "celery",
        description="Where callbacks, errbacks and next steps go that name no queue: the callers' own default queue.",
    )
    celery_completer: bool = Field(
        True, description="Complete tasks on a thread of the ingress; else by `python -m producers.tasks.completer`."
    )
    celery_reply_to: Name = Field(
        "celery", description="The stream of replies; one for each broker that feeds the same queue."
    )
    celery_reply_claim_s: float = Field(
        60.0, gt=0, description="A reply that a completer had for so long is another one's."
    )
    celery_batch_source: str | None = Field(
        None,
        description="file:///folder or s3://bucket/prefix that `submit_batch` may read from; unset: `object_store`.",
    )
    celery_timezone: str = Field("UTC", description="Of the beat's times and dates.")
    celery_beat: tuple[BeatEntry, ...] = Field(
        (), description="Bulk jobs and when they run, each a `name` and a `cron`."
    )

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
