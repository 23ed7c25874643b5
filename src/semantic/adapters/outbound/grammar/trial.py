"""Compiles grammars in processes with limits before the server compiles them itself.

The library does not bound the time and memory of compiling; only the process does. Results are
cached, so that each grammar is tried once.

This module imports neither a backend nor a web framework, so that a subprocess starts quickly and
stays small.
"""

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from semantic.adapters.outbound.grammar.constraint import Closing
from semantic.adapters.outbound.grammar.vocabulary import TokenTable, Vocabulary
from semantic.adapters.outbound.limited_process import (
    LimitedProcesses,
    LimitExceededError,
    ProcessLimits,
    serve,
)

_MAX_VERDICTS = 256
_NUM_STEPS = 8

_LIMITS = ProcessLimits()
EXCEEDED = f"compiling it takes more than {_LIMITS}"

_log = logging.getLogger(__name__)


class GrammarTrials:
    """Tries grammars and caches the results. Thread-safe; `fault` may take seconds."""

    def __init__(self, table: TokenTable) -> None:
        self._processes = LimitedProcesses(__name__, table, "compiling a schema", _LIMITS)
        self._lock = threading.Lock()
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    def fault(self, grammar: str) -> str:
        """Return a grammar's error, possibly `EXCEEDED`; empty if it compiles within the limits.

        Raises:
            OverloadedError: no process became free in time, or none can be started.
        """
        key = hashlib.sha256(grammar.encode()).digest()
        fault = self._known(key)
        if fault is not None:
            return fault
        with self._processes.reserve() as ask:
            fault = self._known(key)  # another thread may have tried it meanwhile
            if fault is None:
                fault = _verdict(ask, grammar)
                self._keep(key, fault)
        return fault

    def _known(self, key: bytes) -> str | None:
        with self._lock:
            fault = self._faults.get(key)
            if fault is not None:
                self._faults.move_to_end(key)
            return fault

    def _keep(self, key: bytes, fault: str) -> None:
        with self._lock:
            self._faults[key] = fault
            while len(self._faults) > _MAX_VERDICTS:
                self._faults.popitem(last=False)


def _verdict(ask: Callable[[bytes], bytes], grammar: str) -> str:
    try:
        fault, warnings = json.loads(ask(grammar.encode()))
    except LimitExceededError:
        _log.warning("refused a grammar: %s", EXCEEDED)
        return EXCEEDED
    for warning in warnings:
        _log.debug("part of a grammar is not enforced: %s", warning)
    return str(fault)


# -- inside the subprocess ----------------------------------------------------------------------


def _prepare(table: TokenTable) -> Callable[[bytes], bytes]:
    vocabulary = Vocabulary(table)
    return lambda grammar: json.dumps(_try(grammar.decode(), vocabulary)).encode()


def _try(text: str, vocabulary: Vocabulary) -> tuple[str, list[str]]:
    """Compile a grammar and run a reply's first steps; returns its error and its warnings."""
    matcher = vocabulary.compile(text)
    warnings = matcher.get_grammar_warnings()
    closing = Closing(vocabulary)
    for _ in range(_NUM_STEPS):
        if matcher.is_stopped():
            break
        vocabulary.mask(matcher)
        options = closing.options(matcher)
        if not options or not matcher.consume_tokens(options[0][:_NUM_STEPS]):
            break
    return matcher.get_error(), warnings


if __name__ == "__main__":
    serve(_prepare)
