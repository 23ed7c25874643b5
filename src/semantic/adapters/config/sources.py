"""Reads settings from their sources, and explains what is wrong in them.

Sources by precedence, highest first: command line, environment (`SEMANTIC_*`), `.env`, the file
given by `--config`, `config/<environment>.toml`, `config/default.toml`, the defaults of `Settings`.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from semantic.adapters.config.settings import ENV_PREFIX, Settings
from semantic.adapters.validation import plain_reason
from semantic.domain.errors import InvalidRequestError

_ENVIRONMENT = "SEMANTIC_ENVIRONMENT"
# Not settings: the first selects a settings file, the others are for commands that call a server.
_NO_SETTINGS = (_ENVIRONMENT, "SEMANTIC_URL", "SEMANTIC_CLIENT_KEY")


def load_settings(
    overrides: dict[str, Any] | None = None,
    *,
    config: Path | None = None,
    config_dir: Path = Path("config"),
) -> Settings:
    """Read settings from all sources; `overrides` are the command line's, and `config` must exist.

    Raises:
        InvalidRequestError: a value is invalid, or a file is missing or unreadable; names it.
    """
    dotenv, in_dotenv = _read_dotenv()
    environment = os.environ.get(_ENVIRONMENT, in_dotenv)
    files = [config_dir / "default.toml"]
    if environment:
        files.append(_existing(config_dir / f"{environment}.toml", _ENVIRONMENT))
    if config:
        files.append(_existing(config, "config"))

    toml = _read_files([file for file in files if file.is_file()])

    class _Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del dotenv_settings, file_secret_settings
            layers = {name: value for values in toml.values() for name, value in values.items()}
            return init_settings, env_settings, dotenv, InitSettingsSource(settings_cls, layers)

    try:
        return _Layered(**overrides or {})
    except ValidationError as error:
        raise _invalid_settings(error.errors(), toml) from error
    except SettingsError as error:  # a variable that must hold JSON
        raise InvalidRequestError(f"{error}: it must be JSON") from error


def _read_files(files: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    found: dict[Path, dict[str, Any]] = {}
    problems = []
    for file in files:
        try:
            found[file] = tomllib.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            problems.append(f"{file} cannot be read: {error}")
    if problems:
        raise InvalidRequestError(_together(problems), param="config")
    return found


def _together(problems: Sequence[str]) -> str:
    """One problem as it is, several as lines."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} problems in the settings:", *problems])


def _read_dotenv() -> tuple[DotEnvSettingsSource, str | None]:
    """Read settings and the selected environment from `.env`, once, since it may be a pipe."""
    try:
        dotenv = DotEnvSettingsSource(Settings, env_file=".env")
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f".env cannot be read: {error}") from error
    found = dotenv.env_vars
    # The file may hold variables of other programs.
    dotenv.env_vars = {
        name: value
        for name, value in found.items()
        if name.startswith(ENV_PREFIX.lower()) and name != _ENVIRONMENT.lower()
    }
    return dotenv, found.get(_ENVIRONMENT.lower())


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that is no setting.

    That is no error, because other programs may use the prefix.
    """
    known = {*(f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields), *_NO_SETTINGS}
    return [
        f"unknown setting {name}, ignored{_suggestion(name)}"
        for name in environment
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    ]


def _invalid_settings(
    problems: Sequence[ErrorDetails], toml: Mapping[Path, Mapping[str, Any]]
) -> InvalidRequestError:
    found = [_describe(problem, toml) for problem in problems]
    return InvalidRequestError(_together([text for _, text in found]), param=found[0][0])


def _describe(
    problem: ErrorDetails, toml: Mapping[Path, Mapping[str, Any]]
) -> tuple[str | None, str]:
    """The name of a setting, and what is wrong with it."""
    name = ".".join(str(part) for part in problem["loc"])
    message = plain_reason(problem)
    if problem["type"] == "extra_forbidden":
        name = name.upper() if name.startswith(ENV_PREFIX.lower()) else name
        message = f"unknown setting{_suggestion(name)}"
        if isinstance(problem["input"], dict):
            message = "unknown setting; a file of settings has no sections"
    text = f"setting {name}: {message}" if name else message
    places = [file for file, values in toml.items() if _is_from(values, problem)]
    return name or None, f"{text} (in {places[-1]})" if places else text


def _is_from(values: Any, problem: ErrorDetails) -> bool:
    for part in problem["loc"]:
        values = values.get(part) if isinstance(values, dict) else None
    return bool(problem["loc"]) and values is not None and values is problem["input"]


def _suggestion(name: str) -> str:
    is_variable = name.upper().startswith(ENV_PREFIX)
    bare = name[len(ENV_PREFIX) :].lower() if is_variable else name
    for found in get_close_matches(bare, Settings.model_fields, n=1):
        return f"; did you mean {ENV_PREFIX + found.upper() if is_variable else found}?"
    return ""


def _existing(path: Path, source: str) -> Path:
    if not path.is_file():
        raise InvalidRequestError(f"{source}: there is no file {path}", param=source)
    return path
