"""Replies that are kept: what names one, what is kept in memory and in the ledger, what goes."""

import json

import pytest

from semantic.adapters.outbound.backends.fake import END_TOKEN, FakeTokenizer
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.agents.ledger import write_at_once
from semantic.application.prompt import replay
from semantic.application.prompt.replay import (
    REPLAY_TTL_S,
    LedgerReplayStore,
    PromptDigest,
    ReplayKey,
    ReplayStore,
    canonical_json,
    emitted_tokens,
    keys_to_look_up,
    keys_to_remember,
    prompt_digest,
)
from semantic.domain.chat import (
    JsonObject,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolUsePart,
)

pytestmark = pytest.mark.unit

PROMPT = prompt_digest(b"root", [1, 2, 3])


def says(*parts: Part) -> Message:
    return Message(Role.ASSISTANT, parts)


def call(arguments: JsonObject, name: str = "f", call_id: str = "id") -> ToolUsePart:
    return ToolUsePart(call_id, name, arguments)


def is_found(reply: Message, echo: Message, *, keeps_thinking: bool = False) -> bool:
    remembered = set(keys_to_remember(PROMPT, reply))
    return not remembered.isdisjoint(keys_to_look_up(PROMPT, echo, keeps_thinking=keeps_thinking))


TEXT = TextPart("Hi.")
CUT = ToolUsePart.cut("id", "f", '{"a": "b')
THOUGHT = ThinkingPart("hmm", "sig")


@pytest.mark.parametrize(
    "reply,echo",
    [
        (says(TEXT), says(TextPart("H"), TextPart("i."))),
        (says(call({"a": 1000.0, "b": "é"})), says(call({"b": "\u00e9", "a": 1000}))),
        (says(CUT), says(CUT)),
        (says(TEXT, CUT), says(TEXT, call({"arguments": '{"a": "b'}))),  # through OpenAI's fields
        (says(TEXT, CUT), says(TEXT, call({}))),
        (says(TEXT, CUT), says(TEXT)),
        (says(call({}, call_id="ours")), says(call({}, call_id="theirs"))),
        (says(TextPart("\n"), call({})), says(call({}))),
        (says(THOUGHT, TEXT), says(THOUGHT, TEXT)),
        (says(THOUGHT, TEXT), says(ThinkingPart("", "sig", is_redacted=True), TEXT)),
    ],
)
def test_replies_with_the_same_content_are_found(reply: Message, echo: Message) -> None:
    assert is_found(reply, echo)


@pytest.mark.parametrize(
    "reply,echo",
    [
        (says(TEXT), says(TextPart("Hi. "))),
        (says(TEXT), says(TextPart("\n"), TEXT)),
        (says(call({"a": 1})), says(call({"a": True}))),
        (says(call({"a": 1})), says(call({"a": 1}, name="g"))),
        (says(call({"a": 1}), call({"a": 2})), says(call({"a": 2}), call({"a": 1}))),
        (says(THOUGHT, TEXT), says(ThinkingPart("edited"), TEXT)),
        (says(TEXT), says(THOUGHT, TEXT)),
        (says(THOUGHT, TEXT), says(TEXT)),
    ],
)
def test_replies_with_other_content_are_not_found(reply: Message, echo: Message) -> None:
    assert not is_found(reply, echo)


def test_omitted_thinking_matters_only_where_it_would_be_shown() -> None:
    assert is_found(says(THOUGHT, TEXT), says(TEXT), keeps_thinking=True)
    assert is_found(says(TEXT), says(TEXT), keeps_thinking=True)
    assert not is_found(says(THOUGHT, TEXT), says(TextPart("Ho.")), keeps_thinking=True)


def test_root_and_prompt_are_part_of_the_name() -> None:
    assert prompt_digest(b"other", [1, 2, 3]) != PROMPT
    assert prompt_digest(b"root", [1, 2]) != PROMPT
    assert prompt_digest(b"ro", [1]) != prompt_digest(b"r", [1])


def test_a_digest_grows_with_its_prompt() -> None:
    digest = PromptDigest(b"root")
    digest.update([1])
    assert digest.followed_by([2, 3]) == PROMPT
    assert digest.followed_by([2, 3]) == PROMPT  # asking changed nothing
    digest.update((2, 3))
    assert digest.followed_by(()) == PROMPT


def test_the_store_drops_what_was_used_least_recently() -> None:
    store = ReplayStore(max_bytes=2 * 400 + 5 * 4)
    keys = [ReplayKey(bytes([i]), b"") for i in range(4)]
    store.remember(keys[0], [1, 2])
    store.remember(keys[1], [3, 4])
    assert store.lookup(keys[0]) == (1, 2)
    store.remember(keys[2], [5, 6])
    assert [store.lookup(key) for key in keys[:3]] == [(1, 2), None, (5, 6)]
    store.remember(keys[2], [7, 8, 9])
    assert [store.lookup(key) for key in keys[:3]] == [(1, 2), None, (7, 8, 9)]
    store.remember(keys[3], range(200))
    assert [store.lookup(key) for key in keys] == [None] * 4


class PairTokenizer(FakeTokenizer):
    """Ids from 1000 are three bytes each; the others are the fake's."""

    PIECES = (b"abc", "é".encode() + b"f", b"x\xc3", b"\xa9y")

    def token_bytes(self, token: int) -> bytes:
        return self.PIECES[token - 1000] if token >= 1000 else super().token_bytes(token)


@pytest.mark.parametrize(
    "tokens,emitted,kept",
    [
        ([1000, 1001], "abcéf", (1000, 1001)),
        ([1000, 1001], "abc", (1000,)),  # the stop string was a token of its own
        ([1000, 1001], "abcé", (1000, *"é".encode())),  # it began inside a token
        ([1000, 1001], "ab", (97, 98)),
        ([1000], "", ()),
        ([1002, 1003], "xéy", (1002, 1003)),
        ([1002, 1003], "xé", tuple("xé".encode())),  # half a character is kept by no token
        ([END_TOKEN, 1000, 97], "abc", (END_TOKEN, 1000)),
    ],
)
def test_only_tokens_whose_text_was_emitted_are_kept(
    tokens: list[int], emitted: str, kept: tuple[int, ...]
) -> None:
    assert emitted_tokens(tokens, emitted, PairTokenizer()) == kept


# -- in the ledger ------------------------------------------------------------------------------

KEY, OTHER = ReplayKey(b"prompt", b"reply"), ReplayKey(b"prompt", b"other")


class Shelf:
    """A ledger, and a reader at a given time."""

    def __init__(self) -> None:
        self.ledger = SqliteLedger.in_memory()
        self.now = 1e9
        self.restart()

    def restart(self) -> None:
        self.replies = LedgerReplayStore(self.ledger, write_at_once(self.ledger), lambda: self.now)

    def collect(self) -> None:
        """Forget what is too old, and what is in memory."""
        self.ledger.forget_unreachable(before=0, replays_before=self.now - REPLAY_TTL_S)
        self.restart()


def test_a_reply_that_is_of_use_is_not_forgotten() -> None:
    shelf = Shelf()
    for key in (KEY, OTHER):
        shelf.replies.remember(key, [1, 2])
    shelf.now += REPLAY_TTL_S - 1
    assert shelf.replies.lookup(KEY) == (1, 2)
    shelf.now += 2
    shelf.collect()
    assert shelf.replies.lookup(KEY) == (1, 2)
    assert shelf.replies.lookup(OTHER) is None


def test_a_reply_that_is_only_looked_at_gets_no_younger() -> None:
    shelf = Shelf()
    shelf.replies.remember(KEY, [1, 2])
    shelf.restart()
    shelf.now += REPLAY_TTL_S - 1
    assert shelf.replies.lookup(KEY, is_used=False) == (1, 2)
    assert shelf.replies.lookup(OTHER, is_used=False) is None
    shelf.now += 2
    shelf.collect()
    assert shelf.replies.lookup(KEY, is_used=False) is None


def test_a_use_is_written_once_a_day_and_again_when_that_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "_MAX_WRITTEN", 1)
    shelf, written = Shelf(), 0

    def write(*changes: object) -> object:
        nonlocal written
        written += len(changes)
        return None

    shelf.replies = LedgerReplayStore(shelf.ledger, write, lambda: shelf.now)  # type: ignore[arg-type]
    shelf.replies.remember(KEY, [1])
    for _ in range(3):
        shelf.replies.lookup(KEY)
    assert written == 1
    shelf.replies.remember(OTHER, [2])
    shelf.replies.lookup(KEY)
    assert written == 3
    shelf.now += 25 * 3600
    for _ in range(3):
        shelf.replies.lookup(KEY)
    assert written == 4


# -- two ways to write the same JSON ----------------------------------------------------------


@pytest.mark.parametrize(
    "one,other",
    [
        ('{"a": 1000.0, "b": "\\u00e9"}', '{"b": "é", "a": 1e3}'),
        ("[0, -0.0, 1.5]", "[0.0, 0, 15e-1]"),
        ("12345678901234567890", "12345678901234567000"),  # as JavaScript writes it
        ('{"a": {"c": 1, "d": [true, null]}}', '{"a":{"d":[true,null],"c":1.0}}'),
    ],
)
def test_equal_values_are_equal_text(one: str, other: str) -> None:
    assert canonical_json(json.loads(one)) == canonical_json(json.loads(other))


@pytest.mark.parametrize(
    "one,other", [("1", "true"), ("1", '"1"'), ("[1, 2]", "[2, 1]"), ("1", "1.5"), ("0", "null")]
)
def test_different_values_are_not(one: str, other: str) -> None:
    assert canonical_json(json.loads(one)) != canonical_json(json.loads(other))


def test_numbers_too_large_for_a_float_stay_distinct() -> None:
    assert canonical_json(10**400) != canonical_json(10**401)
