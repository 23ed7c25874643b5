"""Every way a request can be refused or fail, as one tree.

    SemanticError
      InvalidRequestError          400  a field is missing, wrong or unsupported
        ContextLengthError         400  the prompt does not fit the model's context
        ConflictError              409  what is there now contradicts it
      AuthenticationError          401  no key, or one that this server does not know
      AgentNotFoundError           404
      ModelNotFoundError           404
      RateLimitedError             429  too much in a minute or at once: try again, see below
      QuotaExceededError           429  trying again does not help
        StateQuotaError            429  the conversation takes more bytes than its agent may keep
      PoolExhaustedError           429  } try again after `retry_after_s`
      OverloadedError              529  } (503 to OpenAI clients)
      ModelSwapError               503  the model is loading, or could not be loaded
      DrainingError                503  the server is shutting down
      GenerationTimeoutError       504
      CachePersistenceError             the reply still goes out; the turn is not durable
      CacheCorruptionError              a miss; never shown to a client
      BackendError                 500  the device failed this request
        DeviceLostError                 all its sequences are gone; clients see a ModelSwapError

Which HTTP status and body a protocol makes of an error is the adapters' business.
"""

import re
from typing import Literal


class SemanticError(Exception):
    """Base of all errors this project raises on purpose.

    Attributes:
        message: One sentence for the person who sent the request.
        retry_after_s: When trying again may help, after how many seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """What such errors are counted by.

        >>> PoolExhaustedError("memory is full.").kind
        'pool_exhausted'
        """
        words = re.findall("[A-Z][a-z]+", type(self).__name__.removesuffix("Error"))
        return "_".join(words).lower()


class InvalidRequestError(SemanticError):
    """The request is wrong; sending it again unchanged cannot help.

    Attributes:
        param: The offending field as the client spelled it, e.g. ``messages[0].role``.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt is longer than can be computed with a reply after it.

    Attributes:
        num_prompt: Tokens in the rendered prompt.
        limit: How many tokens fit: the model's context, or less if memory is short.
    """

    def __init__(
        self, *, num_prompt: int, limit: int, param: str, limited_by: str = "the model's context"
    ) -> None:
        super().__init__(
            f"the prompt's {num_prompt} tokens, with room for a reply, exceed {limited_by} of "
            f"{limit}. Shorten the conversation.",
            param=param,
        )
        self.num_prompt = num_prompt
        self.limit = limit


class ConflictError(InvalidRequestError):
    """The request contradicts what is there now, such as a name that is taken."""


class AuthenticationError(SemanticError):
    """No key, or one this server does not know."""


class AgentNotFoundError(SemanticError):
    """No such agent for this tenant."""


class ModelNotFoundError(SemanticError):
    """No such model, here or where models come from."""


class RateLimitedError(SemanticError):
    """Too many requests of one key, tenant or agent, or of all together.

    Attributes:
        allowance: The limit that was reached, if it is one of a minute: `requests` or `tokens`, how
            many, and in how many seconds all of it is there again.
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
    """A tenant or agent has used what it may use."""


class StateQuotaError(QuotaExceededError):
    """A conversation takes more bytes of KV cache than its agent may keep.

    Attributes:
        num_prompt: Tokens in the rendered prompt.
        limit: How many tokens may be kept.
    """

    def __init__(self, message: str, *, num_prompt: int, limit: int) -> None:
        super().__init__(message)
        self.num_prompt = num_prompt
        self.limit = limit


class PoolExhaustedError(SemanticError):
    """Memory for the KV cache ran out and nothing may be evicted."""


class OverloadedError(SemanticError):
    """The queue is full."""


class ModelSwapError(SemanticError):
    """No model is ready: it is loading, or could not be loaded."""


class DrainingError(SemanticError):
    """The server is shutting down and takes no new work."""


class GenerationTimeoutError(SemanticError):
    """The deadline passed before the reply was complete."""


class CachePersistenceError(SemanticError):
    """The KV cache could not be written; the reply is unharmed."""


class CacheCorruptionError(SemanticError):
    """Stored KV cache failed its check; it counts as a miss."""


class BackendError(SemanticError):
    """The device failed while it computed this request."""


class DeviceLostError(BackendError):
    """The device is gone with all its sequences: the model has to be loaded again."""
