"""Reads a model's `generation_config.json`: its recommended sampling parameters.

As in vLLM, these apply where a request sets no value of its own. Invalid values are ignored with a
warning. A model without the file has no defaults of its own.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import SamplingDefaults

GENERATION_CONFIG = "generation_config.json"
# Field, its key in the file, and its type there.
_FIELDS = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "max_tokens": ("max_new_tokens", int),
}

_log = logging.getLogger(__name__)


def read_generation_config(directory: Path) -> SamplingDefaults:
    """Read the sampling defaults from a model's directory."""
    path = directory / GENERATION_CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("ignoring %s: %s", path, error)
        return SamplingDefaults()
    if not isinstance(config, dict):
        _log.warning("ignoring %s: it is not a JSON object", path)
        return SamplingDefaults()
    return _defaults(config, path)


def _defaults(config: Mapping[str, object], path: Path) -> SamplingDefaults:
    known: dict[str, Any] = {}
    for name, (key, kind) in _FIELDS.items():
        value = config.get(key)
        if value is None:
            continue
        try:
            number = _number(value, kind)
            SamplingDefaults(**{name: number})
        except (InvalidRequestError, TypeError, OverflowError) as error:
            _log.warning("%s: ignoring %s %r: %s", path, key, value, error)
        else:
            known[name] = number
    if config.get("do_sample") is False:
        known.setdefault("temperature", 0.0)
    return SamplingDefaults(**known)


def _number(value: object, kind: type) -> Any:
    """Check a JSON number: 1 is valid for 1.0, true is not. A whole number of -1 becomes 0."""
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise TypeError(f"it must be {'a whole number' if kind is int else 'a number'}")
    return 0 if kind is int and value == -1 else kind(value)
