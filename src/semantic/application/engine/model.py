"""A loaded model, and what may be asked of the thread that runs it: each an item of its queue."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from semantic.application.engine.engine import BlockPoolBatchEngine
from semantic.domain.agents import Principal
from semantic.domain.blocks import BlockName, BlockNamespace
from semantic.domain.reply_format import ReplyFormat
from semantic.domain.sampling import SamplingDefaults
from semantic.ports.backend import ModelBackendPort
from semantic.ports.text import GrammarPort, TokenizerPort


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can answer.

    Attributes:
        fingerprint: Tells it from every other model.
        kv_format: How its KV cache rests.
        reply_format: How it writes thinking and tool calls.
        grammar: Enforces the form of its replies; None enforces nothing.
        defaults: How it is sampled where a request does not say.
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
        """A short name of the model's files and what computes them, for clients to compare."""
        name = f"{self.fingerprint or self.id}/{self.backend.traits.kv_abi}"
        return f"fp_{hashlib.sha256(name.encode()).hexdigest()[:10]}"

    @property
    def naming(self) -> tuple[str, str]:
        """What tells the names of its blocks from those of other models: itself, and the format."""
        return self.fingerprint or self.id, f"{self.backend.traits.kv_abi}/{self.kv_format}"

    def root(self, principal: Principal) -> BlockName:
        """Where the block names of a tenant begin for this model."""
        return BlockNamespace(*self.naming, principal.salt).root()


# Loads a model on the device's thread; is given what tells people its steps.
Loader: TypeAlias = Callable[[Callable[[str], None]], LoadedModel]


@dataclass(frozen=True, slots=True)
class Call:
    """Something that is asked of the engine between two steps; without one it counts as done."""

    work: Callable[[BlockPoolBatchEngine], None]
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Drop the model, after `drain_s` at most, and load another with `load`, or none.

    Attributes:
        done: How many requests were cut.
    """

    load: Loader | None
    drain_s: float = 0.0
    done: Future[int] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command: TypeAlias = Call | Exchange | Stop
