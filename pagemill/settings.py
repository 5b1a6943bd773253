"""
Settings: explicit arguments over PAGEMILL_* in the environment over pagemill.toml.

The file is the one that PAGEMILL_CONFIG names, else ./pagemill.toml if it is there. A name that
no setting has is an error, in the file and in the environment: a misspelt setting would
silently leave the default.
"""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from pagemill.errors import SettingsError

PREFIX = "PAGEMILL_"

# read by other parts of Pagemill before there are settings
RESERVED = frozenset({"config", "cache"})

# how the names of programs begin that not every installation has; each of them checks its own
PROGRAMS = ("celery_",)
# tables of the file that are no settings: other parts of Pagemill read them
SECTIONS = frozenset({"bulk", "gateway"})

# how the names of other parts' settings begin in the environment
OTHERS = (f"{PREFIX}GATEWAY_",)


class Settings(BaseSettings):
    """
    Base of all settings. Subclasses add fields; `load` makes them.

    Programs that share one environment and one file each know a part of the names: `load` takes
    the classes whose names are right besides its own.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  pydantic passes them by name
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = config_file(os.environ)
        file = (TomlConfigSettingsSource(settings_cls, path),) if path else ()
        return (init_settings, env_settings, *file)

    @classmethod
    def load(cls, *, also: Iterable[type["Settings"]] = (), strict: bool = True, **explicit: Any) -> Self:
        """
        Read the settings; an explicit None counts as not given.

        Args:
            also: Classes whose names may stand in the environment and the file too.
            strict: Refuse names that nothing knows. A library that finds itself in another
                program's environment is not strict: it refuses only what is nearly one of its
                own names, for the others may be that program's.

        Raises:
            SettingsError: a name is unknown (and the nearest known one), or a value is wrong.
        """
        given = {name: value for name, value in explicit.items() if value is not None}
        known = set(cls.model_fields).union(*(set(other.model_fields) for other in also))
        _refuse_unknown(given, set(cls.model_fields), "")
        path = config_file(os.environ)
        _refuse_unknown(_environment(os.environ), known | RESERVED, PREFIX, strict=strict)
        _refuse_unknown(_read(path) if path else {}, known | SECTIONS, f"{path}: ", strict=strict)
        try:
            return cls(**given)
        except ValidationError as error:
            raise SettingsError(_explain(error)) from None


class LogSettings(Settings):
    """What a program logs, and how."""

    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="auto is text on a terminal and JSON lines elsewhere."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least urgent lines that are logged."
    )
    log_limit: int = Field(20, ge=0, description="Lines of one event in ten seconds; 0 for no limit.")
    log_prompts: bool = Field(False, description="Log the beginning of each prompt and answer.")


class ClientSettings(Settings):
    """What a producer needs to know."""

    redis_url: str = Field(
        "redis://localhost:6379/0",
        description="The queue's server, or the way to it: redis://, redis+sentinel://, redis+cluster://, each with "
        "TLS too; see client.md.",
    )
    queue: str = Field("default", description="Name of the queue there.")
    object_store: str | None = Field(
        None,
        description="Where large payloads and results are: file:///folder or s3://bucket/prefix; unset: all is in "
        "Redis, up to 8 MiB a job.",
    )
    max_queued_tokens: int = Field(
        1_000_000_000,
        ge=0,
        description="Submits are refused as busy while more estimated tokens wait; 0 for no limit.",
    )
    tracing: bool = Field(
        False, description="Make spans with OpenTelemetry, and have jobs carry their trace; see observability.md."
    )
    trace_rows: bool = Field(False, description="Also the jobs of bulk runs and batch files have spans in the worker.")


def config_file(environment: Mapping[str, str]) -> Path | None:
    """
    Raises:
        SettingsError: PAGEMILL_CONFIG names a file that is not there.
    """
    named = environment.get(f"{PREFIX}CONFIG")
    if named:
        if not Path(named).is_file():
            raise SettingsError(f"{PREFIX}CONFIG is {named!r}: there is no such file")
        return Path(named)
    found = Path("pagemill.toml")
    return found if found.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and not name.startswith(OTHERS)
    }


def _refuse_unknown(given: Mapping[str, object], known: set[str], where: str, *, strict: bool = True) -> None:
    for name in given.keys() - known:
        if name.startswith(PROGRAMS) and not any(one.startswith(PROGRAMS) for one in known):
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.6 if strict else 0.85)
        if not near and not strict:
            continue
        shown, *hints = [where + (word.upper() if where == PREFIX else word) for word in (name, *near)]
        hint = f"did you mean {hints[0]}?" if hints else "there is none of a similar name"
        raise SettingsError(f"unknown setting {shown}: {hint}")


def _explain(error: ValidationError) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        name = ".".join(map(str, fault["loc"]))
        lines.append(f"{PREFIX}{name.upper()} (or {name}) is {fault['input']!r}: {fault['msg']}")
    return "; ".join(lines)
