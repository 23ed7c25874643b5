"""Reads the table of known models."""

import functools
import tomllib
from importlib import resources
from typing import Any

from semantic.domain.model_names import KnownModel


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """The models of `known_models.toml`, the smallest first."""
    rows = _table()["models"]
    return tuple(
        KnownModel(num_bytes=int(row.pop("gigabytes") * 10**9), has_tools=row.pop("tools"), **row)
        for row in rows
    )


def table_version() -> str:
    """The date of the table."""
    return str(_table()["version"])


def short_names(*, is_four_bit: bool) -> dict[str, str]:
    """Map short names of models to Hugging Face ids."""
    return {one.name: one.four_bit if is_four_bit else one.published for one in known_models()}


def _table() -> dict[str, Any]:
    package = resources.files("semantic.adapters.outbound.models")
    return tomllib.loads(package.joinpath("known_models.toml").read_text("utf-8"))
