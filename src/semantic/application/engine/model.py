"""A loaded model, and the commands that other threads queue for the device thread."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.domain.agents import Principal
from semantic.domain.blocks import BlockName, BlockNamespace
from semantic.domain.reply_format import ReplyFormat
from semantic.domain.sampling import SamplingDefaults
from semantic.ports.backend import ModelBackendPort
from semantic.ports.text import GrammarPort, TokenizerPort

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to serve requests.

    Attributes:
        fingerprint: Identifies the model; if empty, `id` does.
        kv_format: Storage format of its sealed KV cache.
        reply_format: How the model writes thinking and tool calls.
        grammar: Constrains replies to a schema or grammar; None disables this.
        defaults: Sampling parameters for requests that set none.
    """

    id: str
    backend: ModelBackendPort
    tokenizer: TokenizerPort
    fingerprint: str = ""
    kv_format: str = "raw"
    reply_format: ReplyFormat = field(default_factory=ReplyFormat)
    grammar: GrammarPort | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def system_fingerprint(self) -> str:
        """A short hash of the model and the backend's KV ABI, for clients to compare."""
        name = f"{self.fingerprint or self.id}/{self.backend.traits.kv_abi}"
        return f"fp_{hashlib.sha256(name.encode()).hexdigest()[:10]}"

    @property
    def naming(self) -> tuple[str, str]:
        """The model's identity and KV format; both are part of every block name."""
        return self.fingerprint or self.id, f"{self.backend.traits.kv_abi}/{self.kv_format}"

    def root(self, principal: Principal) -> BlockName:
        """Return the root of a tenant's block names for this model."""
        return BlockNamespace(*self.naming, principal.salt).root()

    def text_root(self, principal: Principal) -> BlockName:
        """Return the root of a tenant's text names for this model.

        It does not depend on the KV format, since token ids are the same in every dtype.
        """
        return BlockNamespace(self.naming[0], "", principal.salt).root()


# Loads a model on the device thread; its argument receives human-readable progress messages.
Loader: TypeAlias = Callable[[Callable[[str], None]], LoadedModel]


def _uncancellable() -> Future[T]:
    """Return a running future: asyncio would cancel a pending one whose waiter is cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True, slots=True)
class Call:
    """Runs `work` on the engine between two steps; without an engine it does nothing."""

    work: Callable[[BlockPoolBatchEngine], None]
    done: Future[None] = field(default_factory=_uncancellable)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Unloads the model after at most `drain_s` seconds and loads another; None loads none.

    Attributes:
        done: Resolves to the number of requests cut short.
    """

    load: Loader | None
    drain_s: float = 0.0
    done: Future[int] = field(default_factory=_uncancellable)


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the device thread."""


Command: TypeAlias = Call | Exchange | Stop
