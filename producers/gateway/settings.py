"""The gateway's settings: flags over PAGEMILL_GATEWAY_* over the table [gateway] of pagemill.toml."""

import os
import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pagemill.errors import SettingsError
from pagemill.settings import PREFIX, config_file

SECTION = "gateway"


def _lines(value: Any) -> Any:
    """A list, or its members with commas between, as an environment variable has them."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


class GatewaySettings(BaseSettings):
    """
    What the gateway needs to know besides the queue (`redis_url`, `queue`, `object_store` of the client).
    """

    model_config = SettingsConfigDict(env_prefix=f"{PREFIX}GATEWAY_", extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen at.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen at; 0 takes a free one.")
    keys_file: Path | None = Field(None, description="The file of API keys; see `pagemill gateway keys create`.")
    no_auth: bool = Field(False, description="Serve without keys; on a loopback address only.")
    no_status_page: bool = Field(False, description="Do not serve the page at /status.")
    max_body_bytes: ByteSize = Field(ByteSize(8 * 1024**2), description="Requests with a larger body are refused.")
    max_file_bytes: ByteSize = Field(ByteSize(512 * 1024**2), description="Uploads that are larger are refused.")
    max_in_flight: int = Field(4096, ge=1, description="Generations at a time; more are told to come back later (503).")
    answer_tokens: int | None = Field(
        None, ge=1, description="Most tokens of an answer that names no limit; unset: what the context leaves."
    )
    timeout_s: float = Field(600.0, gt=0, description="A request that has no answer by then fails.")
    normalise_system_prompts: bool = Field(
        False, description="System messages that differ in white space alone become one, for the prefix cache."
    )
    drop_system_lines: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="Lines of system messages that match one of these are left out."
    )
    cors_origins: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="Origins whose pages may call; none by default."
    )
    max_batches: int = Field(
        4, ge=0, description="Batches that a process beside this one works on at a time; 0 leaves all to others."
    )
    grace_s: float = Field(30.0, ge=0, description="How long running requests may go on after SIGTERM.")
    file_ttl_s: int = Field(30 * 86400, ge=60, description="How long files and batches are known.")

    _split = field_validator("drop_system_lines", "cors_origins", mode="before")(_lines)

    @field_validator("drop_system_lines")
    @classmethod
    def _are_patterns(cls, value: list[str]) -> list[str]:
        for one in value:
            try:
                re.compile(one)
            except re.error as error:
                raise ValueError(f"{one!r} is no regular expression: {error}") from None
        return value

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(one) for one in self.drop_system_lines]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  pydantic passes them by name
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, InitSettingsSource(settings_cls, _section()))

    @classmethod
    def load(cls, **explicit: Any) -> Self:
        """
        Read the settings; an explicit None counts as not given.

        Raises:
            SettingsError: a name is unknown, or a value is wrong.
        """
        start = f"{PREFIX}GATEWAY_"
        given = [name.removeprefix(start).lower() for name in os.environ if name.startswith(start)]
        for name in (*given, *_section()):
            if name not in cls.model_fields:
                near = get_close_matches(name, cls.model_fields, n=1)
                hint = f"did you mean {near[0]}?" if near else "there is none of a similar name"
                raise SettingsError(f"unknown setting {name} of the gateway: {hint}")
        try:
            return cls(**{name: value for name, value in explicit.items() if value is not None})
        except ValidationError as error:
            faults = error.errors(include_url=False)
            lines = [f"{'.'.join(map(str, one['loc']))} is {one['input']!r}: {one['msg']}" for one in faults]
            raise SettingsError("gateway: " + "; ".join(lines)) from None


def _section() -> dict[str, Any]:
    path = config_file(os.environ)
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get(SECTION, {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{path}: {SECTION} is {found!r}: want a table")
    return found
