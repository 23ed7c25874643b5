"""Applies rules to requests before they are rendered, so that volatile text repeats.

Only a server with rules that are switched on uses this module. Text that must repeat in later turns
is kept in the replay store, beside the tokens of replies, once its turn is logged.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

from semantic.application.engine.model import LoadedModel
from semantic.application.prompt.compose import num_leading_system
from semantic.application.prompt.renderer import Prompt
from semantic.application.prompt.replay import ReplayKey, ReplayStore, canonical_json
from semantic.application.requests.identity import Claim
from semantic.application.requests.prepare import Preparation, PreparedRequest
from semantic.domain.agents import Principal
from semantic.domain.chat import ChatRequest, Message, Role, TextPart, ToolResultPart
from semantic.domain.errors import InvalidRequestError
from semantic.domain.volatile.rules import (
    AppliedRepairs,
    CallingClient,
    RepairAction,
    RepairPlace,
    RepairRule,
    as_note,
    found_texts,
    with_texts,
    without_texts,
)

_PartT = TypeVar("_PartT")
_TAG = b"semantic.repair.v1"
_INDEXED = re.compile(r"(messages|tools)\[(\d+)\](.*)", re.DOTALL)
_ROLES = {RepairPlace.SYSTEM: Role.SYSTEM, RepairPlace.USER: Role.USER}

# The client of the current request; the HTTP adapter sets it.
CALLING_CLIENT: ContextVar[CallingClient | None] = ContextVar("calling_client", default=None)


@dataclass(frozen=True, slots=True)
class RepairedRequest:
    """A request after the rules, and where its messages and tools were before.

    Attributes:
        messages_at: Index of each message in the client's request.
        tools_at: Index of each known tool in the client's request.
    """

    request: ChatRequest
    applied: AppliedRepairs
    messages_at: Sequence[int]
    tools_at: Sequence[int]

    @contextlib.contextmanager
    def original_params(self) -> Iterator[None]:
        """Make errors name messages and tools by their index in the client's request."""
        try:
            yield
        except InvalidRequestError as error:
            error.param = _INDEXED.sub(self._original, error.param or "") or error.param
            raise

    def _original(self, match: re.Match[str]) -> str:
        name, index, rest = match[1], int(match[2]), match[3]
        places = self.messages_at if name == "messages" else self.tools_at
        return f"{name}[{places[index] if index < len(places) else index}]{rest}"


class PromptRepairs:
    """The rules that are switched on, and the texts that they keep. Thread-safe."""

    def __init__(self, rules: Sequence[RepairRule], store: ReplayStore) -> None:
        self._rules = tuple(rule for rule in rules if rule.is_enabled)
        self._store = store

    def repair(self, request: ChatRequest, root: bytes) -> RepairedRequest:
        """Apply the rules for the client of the current request; stores nothing.

        Args:
            root: Identifies the tenant and the model; texts are not shared between roots.
        """
        client = CALLING_CLIENT.get() or CallingClient()
        rules = [rule for rule in self._rules if rule.is_for(client)]
        work = _Work(request, root, rules, self._store)
        if request.raw_prompt is None:
            for rule in rules:
                work.apply(rule)
        return work.result()

    def keep(self, applied: AppliedRepairs) -> None:
        """Store the texts that later turns repeat."""
        for key, texts in applied.notes:
            place, stored = ReplayKey(*key), _packed(texts)
            if self._store.lookup(place) != stored:
                self._store.remember(place, stored)


class _Work:
    """One request while rules change it."""

    def __init__(
        self, request: ChatRequest, root: bytes, rules: Sequence[RepairRule], store: ReplayStore
    ) -> None:
        self._request = request
        self._store = store
        self._root = hashlib.sha256(_TAG + root).digest()
        self._messages = list(request.messages)
        self._tools = request.tools
        self._chain = _digests(request, rules)
        hint = request.agent
        self._name = hint.agent_id or hint.session or hint.client_key
        before_reply = takewhile(lambda m: m.role is not Role.ASSISTANT, request.messages)
        num_before = self._num_before = sum(1 for _ in before_reply)
        # A conversation without name or reply is new, even if an older one began in the same way.
        self._is_new = not self._name and num_before == len(request.messages)
        self._beginning = self._chain[num_before - 1] if num_before else ""
        self._head = set(range(num_leading_system(request.messages)))
        self._names: list[str] = []
        self._notes: list[tuple[tuple[bytes, bytes], tuple[str, ...]]] = []

    def apply(self, rule: RepairRule) -> None:
        is_changed = {
            RepairAction.FREEZE: self._freeze,
            RepairAction.MOVE_TO_START: self._move_to_start,
            RepairAction.MOVE_TO_END: self._move_to_end,
            RepairAction.SORT_TOOLS: self._sort_tools,
            RepairAction.DROP: self._drop,
        }[rule.action](rule)
        if is_changed:
            self._names.append(rule.name)

    def result(self) -> RepairedRequest:
        request, num_marked = self._request, self._request.num_marked
        given = enumerate(zip(self._messages, request.messages, strict=True))
        kept = [at for at, (message, before) in given if message.parts or not before.parts]
        kept.sort(key=lambda at: at not in self._head)
        if self._names:
            request = replace(
                request,
                messages=tuple(self._messages[at] for at in kept),
                tools=self._tools,
                num_marked=num_marked and sum(1 for at in kept if at < num_marked),
            )
        known = {tool.name: at for at, tool in enumerate(self._request.known_tools)}
        return RepairedRequest(
            request,
            AppliedRepairs(tuple(self._names), tuple(self._notes)),
            kept,
            [known[tool.name] for tool in request.known_tools],
        )

    # -- the actions ----------------------------------------------------------------------------

    def _freeze(self, rule: RepairRule) -> bool:
        is_changed = False
        for at, message in enumerate(self._messages):
            found = _found(message, rule)
            if not found:
                continue
            kept = self._recall(rule, at)
            texts = (*kept[: len(found)], *found[len(kept) :])
            self._note(rule, at, texts)
            if texts != tuple(found):
                edit = partial(with_texts, find=rule.find, texts=iter(texts))
                self._messages[at] = _edited(message, rule.place, edit)
                is_changed = True
        return is_changed

    def _drop(self, rule: RepairRule) -> bool:
        is_changed = False
        for at, message in enumerate(self._messages):
            if _found(message, rule):
                edit = partial(without_texts, find=rule.find)
                self._messages[at] = _edited(message, rule.place, edit)
                is_changed = True
        return is_changed

    def _move_to_start(self, rule: RepairRule) -> bool:
        """Move system messages before the first question; those behind a reply stay."""
        places = set(range(self._num_before)) - self._head
        moved = {at for at in places if _found(self._messages[at], rule)}
        self._head |= moved
        return bool(moved)

    def _move_to_end(self, rule: RepairRule) -> bool:
        """Move text to the last user message; earlier ones keep what was moved to them."""
        questions = [at for at, message in enumerate(self._messages) if _is_question(message)]
        moved = tuple(text for message in self._messages for text in _found(message, rule))
        if not questions or not (moved and self._drop(rule)):
            return False
        for at in questions:
            texts = self._recall(rule, at)
            if at == questions[-1]:
                texts = texts or moved
            if texts:
                self._note(rule, at, texts)
                message = self._messages[at]
                note = TextPart(as_note(texts))
                self._messages[at] = replace(message, parts=(*message.parts, note))
        return True

    def _sort_tools(self, rule: RepairRule) -> bool:
        del rule
        given = self._tools
        self._tools = tuple(sorted(given, key=lambda tool: tool.name))
        return self._tools != given

    # -- texts of earlier turns -----------------------------------------------------------------

    def _key(self, rule: RepairRule, at: int) -> tuple[bytes, bytes]:
        place = canonical_json([rule.name, self._name or self._beginning, self._chain[at]])
        return self._root, hashlib.sha256(place.encode("utf-8", "surrogatepass")).digest()

    def _recall(self, rule: RepairRule, at: int) -> tuple[str, ...]:
        if self._is_new:
            return ()
        kept = self._store.lookup(ReplayKey(*self._key(rule, at)), is_used=False)
        return _unpacked(kept) if kept else ()

    def _note(self, rule: RepairRule, at: int, texts: tuple[str, ...]) -> None:
        self._notes.append((self._key(rule, at), texts))


class RepairingPreparation(Preparation):
    """Prepares requests after rules have changed them."""

    def __init__(self, plain: Preparation, repairs: PromptRepairs) -> None:
        """Prepare like `plain`, with which it shares all parts."""
        vars(self).update(vars(plain))
        self._repairs = repairs

    def prepare(
        self, request: ChatRequest, principal: Principal, model: LoadedModel, claim: Claim
    ) -> PreparedRequest:
        repaired = self._repairs.repair(request, model.text_root(principal))
        with repaired.original_params():
            prepared = super().prepare(repaired.request, principal, model, claim)
        if (client := CALLING_CLIENT.get()) is not None:
            client.repairs = repaired.applied.rules
        return replace(prepared, repairs=repaired.applied)

    def render(self, request: ChatRequest, principal: Principal, model: LoadedModel) -> Prompt:
        repaired = self._repairs.repair(request, model.text_root(principal))
        with repaired.original_params():
            return super().render(repaired.request, principal, model)


# -- messages -------------------------------------------------------------------------------------


def _is_question(message: Message) -> bool:
    """Whether a user wrote the message; text after a tool result would look like a new question."""
    has_text = any(isinstance(part, TextPart) and part.text.strip() for part in message.parts)
    has_result = any(isinstance(part, ToolResultPart) for part in message.parts)
    return message.role is Role.USER and has_text and not has_result


def _edited(message: Message, place: RepairPlace, edit: Callable[[str], str]) -> Message:
    """Change the texts of a message that belong to a place; empty texts are left out."""
    if place is RepairPlace.TOOL_RESULT:
        results = (
            replace(part, content=tuple(_edited_text(inner, edit) for inner in part.content))
            if isinstance(part, ToolResultPart)
            else part
            for part in message.parts
        )
        return replace(message, parts=tuple(results))
    if message.role is not _ROLES.get(place):
        return message
    parts = (_edited_text(part, edit) for part in message.parts)
    return replace(message, parts=tuple(part for part in parts if part != TextPart("")))


def _edited_text(part: _PartT, edit: Callable[[str], str]) -> _PartT | TextPart:
    return TextPart(edit(part.text)) if isinstance(part, TextPart) else part


def _found(message: Message, rule: RepairRule) -> list[str]:
    found: list[str] = []

    def collect(text: str) -> str:
        found.extend(found_texts(text, rule.find))
        return text

    _edited(message, rule.place, collect)
    return found


def _digests(request: ChatRequest, rules: Sequence[RepairRule]) -> list[str]:
    """Return a digest of the conversation up to each message, without replies and volatile text."""
    digest, digests = hashlib.sha256(), []
    for message in request.messages:
        stable = message
        for rule in rules:
            edit = partial(without_texts, find=rule.find)
            stable = _edited(stable, rule.place, edit)
        if message.role is not Role.ASSISTANT:
            digest.update(json.dumps([message.role.value, stable.text]).encode())
        digests.append(digest.hexdigest())
    return digests


def _packed(texts: Sequence[str]) -> tuple[int, ...]:
    return tuple(json.dumps(texts).encode())


def _unpacked(stored: Sequence[int]) -> tuple[str, ...]:
    return tuple(json.loads(bytes(stored)))
