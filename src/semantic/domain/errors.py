"""All errors of the server, as one tree.

    SemanticError
      InvalidRequestError          400  a field is missing, wrong or unsupported
        ContextLengthError         400  the prompt does not fit the model's context
        CompactionError            400  the conversation cannot be summarised
        ConflictError              409  the request conflicts with the current state
        ItemNotFoundError          404  the request refers to an item that is not stored
      AuthenticationError          401  no key, or a key that this server does not know
      AgentNotFoundError           404
      ModelNotFoundError           404
      RateLimitedError             429  a rate or concurrency limit is reached: retry, see below
      QuotaExceededError           429  retrying does not help
        StateQuotaError            429  the conversation takes more bytes than its agent may keep
      PoolExhaustedError           429  } retry after `retry_after_s`
      OverloadedError              529  } (503 to OpenAI clients)
      ModelSwapError               503  the model could not be loaded, or the request cannot wait
      DrainingError                503  the server is shutting down
      GenerationTimeoutError       504
      CachePersistenceError        503  a change is not on disk; replies still go out, not durable
      CacheCorruptionError              a cache miss; never shown to a client
      BackendError                 500  the device failed this request
        DeviceLostError                 all its sequences are lost; clients see a ModelSwapError

The protocol adapters choose the HTTP status and body of an error.
"""

import re
from typing import Literal


class SemanticError(Exception):
    """Base of all errors that this project raises deliberately.

    Attributes:
        message: One sentence for the sender of the request.
        retry_after_s: Seconds after which a retry may succeed, where known.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """The label under which metrics count this error.

        >>> PoolExhaustedError("memory is full.").kind
        'pool_exhausted'
        """
        words = re.findall("[A-Z][a-z]+", type(self).__name__.removesuffix("Error"))
        return "_".join(words).lower()


def internal_error() -> SemanticError:
    """Return the error that a client receives when the server has a bug."""
    return SemanticError("an internal error ended this reply; see the server's log.")


class InvalidRequestError(SemanticError):
    """The request is invalid; sending it again unchanged cannot succeed.

    Attributes:
        param: The invalid field as the client spelled it, e.g. ``messages[0].role``.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for a reply.

    Attributes:
        num_prompt: Tokens in the rendered prompt.
        limit: Tokens that fit: the model's context, or less if memory is short.
    """

    def __init__(
        self, *, num_prompt: int, limit: int, param: str, limited_by: str = "the model's context"
    ) -> None:
        super().__init__(
            f"the prompt of {num_prompt} tokens, with room for a reply, exceeds {limited_by} of "
            f"{limit} tokens. Shorten the conversation.",
            param=param,
        )
        self.num_prompt = num_prompt
        self.limit = limit


class CompactionError(InvalidRequestError):
    """The conversation is too short to compact, or its summary is empty or was cut off."""


class ConflictError(InvalidRequestError):
    """The request conflicts with the current state, e.g. a name is already taken."""


class ItemNotFoundError(InvalidRequestError):
    """The request refers to an item of a response that is not stored."""


class AuthenticationError(SemanticError):
    """No key, or a key that this server does not know."""


class AgentNotFoundError(SemanticError):
    """The tenant has no such agent."""


class ModelNotFoundError(SemanticError):
    """The model is neither on this machine nor at the source of models."""


class RateLimitedError(SemanticError):
    """Too many requests of one key, tenant or agent, or of all together.

    Attributes:
        allowance: The limit per minute that was reached, if it is one: its kind, its size, and the
            seconds until all of it is available again.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        allowance: tuple[Literal["requests", "tokens"], int, float] | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.allowance = allowance


class QuotaExceededError(SemanticError):
    """A tenant or agent has reached its quota."""


class StateQuotaError(QuotaExceededError):
    """A conversation takes more bytes of KV cache than its agent may keep.

    Attributes:
        num_prompt: Tokens in the rendered prompt.
        limit: Number of tokens that may be kept.
    """

    def __init__(self, message: str, *, num_prompt: int, limit: int) -> None:
        super().__init__(message)
        self.num_prompt = num_prompt
        self.limit = limit


class PoolExhaustedError(SemanticError):
    """Memory for the KV cache is full and nothing can be evicted."""


class OverloadedError(SemanticError):
    """The queue is full."""


class ModelSwapError(SemanticError):
    """No model is ready: it is loading, or could not be loaded."""


class DrainingError(SemanticError):
    """The server is shutting down and accepts no new work."""


class GenerationTimeoutError(SemanticError):
    """The deadline passed before the reply was complete."""


class CachePersistenceError(SemanticError):
    """The ledger or the KV cache cannot be written or read now; replies are not affected."""


class CacheCorruptionError(SemanticError):
    """Stored KV cache is missing or failed verification; it counts as a cache miss."""


class BackendError(SemanticError):
    """The device failed while computing this request."""


class DeviceLostError(BackendError):
    """The device failed and lost all its sequences; the model must be loaded again."""
