"""The names under which the served model may be asked for."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from semantic.domain.errors import ModelNotFoundError

# Clients made for Anthropic's models ask for them by name, in the background too.
_BUILT_IN_ALIASES = ("claude*", "anthropic/claude*")


def require_served(name: str, model_id: str, aliases: Sequence[str] = ()) -> None:
    """Accept a model's own name, an alias, or none at all.

    Args:
        name: What a request asks for; empty takes whatever is served.
        model_id: The served model's own name.
        aliases: Patterns as in a shell, upper and lower case alike.

    Raises:
        ModelNotFoundError: it is another name; says which are served.
    """
    patterns = (*_BUILT_IN_ALIASES, *aliases)
    is_alias = any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)
    if name and name != model_id and not is_alias:
        raise ModelNotFoundError(
            f"the model {name!r} is not served here; this server serves {model_id!r}, also as "
            f"{', '.join(map(repr, patterns))}. Use one of these names or none, or add yours to "
            "the setting model_aliases."
        )
