"""From sampled tokens to text, from text to the reply's events, and from events to a message."""

import codecs
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from semantic.application.parsing.call_splitter import CallSplitter
from semantic.application.parsing.harmony import HarmonySplitter
from semantic.application.parsing.splitter import Splitter, ThinkingSplitter
from semantic.domain.chat import (
    JsonObject,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolSpec,
    ToolUsePart,
)
from semantic.domain.events import (
    Event,
    Failed,
    Finished,
    PromptScored,
    ScoredToken,
    TextDelta,
    ThinkingDelta,
    ThinkingEnded,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from semantic.domain.reply_format import HARMONY, ReplyFormat
from semantic.domain.sampling import FinishReason, StopMatcher, TokenLogprob


class TextAssembler:
    """Turns sampled tokens into text that is safe to emit. Not thread-safe; one per request.

    Works on bytes: it holds back a character that is split over tokens until it is complete, and
    loses no spaces. The joined pieces equal the decoding of all tokens, without the stop string.

    Special tokens produce no text, except the `visible` ones, which the reply's parser needs. In
    log-probabilities they have their `spelled` text, if it is given.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stops: Sequence[str] = (),
        visible: Mapping[int, bytes] | None = None,
        spelled: Mapping[int, bytes] | None = None,
    ) -> None:
        self._plain_bytes = token_bytes
        self._spelled = spelled
        self._visible = visible or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)
        self._logprobs: list[ScoredToken] = []

    @property
    def stop(self) -> str | None:
        """The stop string that matched, if any; do not call `feed` after a match."""
        return self._matcher.stop

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> TextDelta | None:
        """Add a token; returns the text that is now safe to emit, if any."""
        if logprob is not None:
            self._logprobs.append(self._scored(logprob))
        return self._delta(self._matcher.feed(self._decoder.decode(self._token_bytes(token))))

    def end(self, logprob: TokenLogprob | None) -> None:
        """Add the token that ended the reply, which has no text."""
        if logprob is not None and self._spelled is not None:
            self._logprobs.append(self._scored(logprob))

    def prompt_scored(self, first: int, rest: Sequence[TokenLogprob]) -> PromptScored:
        return PromptScored(self._spelling(first), tuple(map(self._scored, rest)))

    def finish(self) -> TextDelta | None:
        """Return the text held back so far; call it after the last token."""
        if self.stop is not None:
            return None
        text = self._matcher.feed(self._decoder.decode(b"", final=True))
        has_scores = self._spelled is not None and bool(self._logprobs)
        return self._delta(text + self._matcher.flush(), may_be_empty=has_scores)

    def _delta(self, text: str, *, may_be_empty: bool = False) -> TextDelta | None:
        if not text and not may_be_empty:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextDelta(text, logprobs)

    def _token_bytes(self, token: int) -> bytes:
        return self._visible.get(token) or self._plain_bytes(token)

    def _scored(self, logprob: TokenLogprob) -> ScoredToken:
        top = tuple((self._spelling(token), value) for token, value in logprob.top)
        return ScoredToken(self._spelling(logprob.token), logprob.logprob, top)

    def _spelling(self, token: int) -> bytes:
        return (self._spelled or {}).get(token) or self._token_bytes(token)


def _random_id() -> str:
    return secrets.token_hex(12)


class ReplyParser:
    """Splits one reply's raw text into thinking, text and tool calls. Not thread-safe.

    Example:
        >>> parser = ReplyParser(ReplyFormat(), new_id=lambda: "1")
        >>> parser.push(TextDelta("Hi"))
        [TextDelta(text='Hi', logprobs=())]
    """

    def __init__(
        self,
        reply_format: ReplyFormat,
        tools: Sequence[ToolSpec] = (),
        *,
        is_thinking_open: bool = False,
        is_parallel: bool = True,
        must_call: bool = False,
        new_id: Callable[[], str] = _random_id,
        sign: Callable[[], str] = _random_id,
    ) -> None:
        """Create a parser for one reply.

        Args:
            tools: The tools that may be called; if there are none, tool markup is text.
            is_parallel: Allow more than one call; if False, all after the first call is dropped.
        """
        self._is_parallel = is_parallel
        self._is_over = False
        self._has_calls = False
        self._custom = frozenset(tool.name for tool in tools if tool.is_custom)
        self._splitters: list[Splitter] = []
        if reply_format.tools == HARMONY:
            self._splitters.append(HarmonySplitter(tools, new_id, sign))
            return
        if reply_format.thinking is not None:
            thinking = ThinkingSplitter(reply_format.thinking, is_open=is_thinking_open, sign=sign)
            self._splitters.append(thinking)
        if tools or reply_format.tools.before_text:
            calls = CallSplitter(reply_format.tools, tools, new_id, must_call=must_call)
            self._splitters.append(calls)

    def push(self, event: Event) -> list[Event]:
        """Process an event of the engine; returns the events that are certain now, if any."""
        match event:
            case TextDelta():
                events: list[Event] = [event]
                for splitter in self._splitters:
                    events = _through(splitter, events)
                return self._wanted(events)
            case Finished(reason):
                events = self._flush(is_cut=reason is not FinishReason.END_TURN)
                if reason is FinishReason.END_TURN and self._has_calls:
                    reason = FinishReason.TOOL_USE
                return [*events, replace(event, reason=reason)]
            case Failed():
                return [*self._flush(is_cut=True), event]
            case _:
                return [event]

    def _flush(self, *, is_cut: bool) -> list[Event]:
        events: list[Event] = []
        for splitter in self._splitters:
            events = [*_through(splitter, events), *splitter.finish(is_cut=is_cut)]
        return self._wanted(events)

    def _wanted(self, events: list[Event]) -> list[Event]:
        self._has_calls |= any(isinstance(event, ToolCallStarted) for event in events)
        if self._custom:
            events = [self._typed(event) for event in events]
        if self._is_parallel:
            return events
        wanted: list[Event] = []
        for event in events:
            wanted += [] if self._is_over else [event]
            self._is_over |= isinstance(event, ToolCallEnded)
        return wanted

    def _typed(self, event: Event) -> Event:
        if isinstance(event, ToolCallStarted) and event.name in self._custom:
            return replace(event, is_custom=True)
        return event


def _through(splitter: Splitter, events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        out += splitter.feed(event) if isinstance(event, TextDelta) else [event]
    return out


@dataclass(slots=True)
class _GrowingPart:
    """A part of the message that may still grow; `event` is its first event."""

    event: TextDelta | ThinkingDelta | ToolCallStarted
    pieces: list[str] = field(default_factory=list)
    signature: str = ""
    is_ended: bool = False

    def part(self) -> Part:
        written = "".join(self.pieces)
        match self.event:
            case TextDelta():
                return TextPart(written)
            case ThinkingDelta():
                return ThinkingPart(written, self.signature)
            case ToolCallStarted(_, call_id, name, is_custom) if self.is_ended:
                return ToolUsePart(call_id, name, _object(written), is_custom=is_custom)
            case ToolCallStarted(_, call_id, name, is_custom):
                return ToolUsePart.cut(call_id, name, written, is_custom=is_custom)


class MessageFold:
    """Folds events into the parts of a message, in order."""

    def __init__(self) -> None:
        self._parts: list[_GrowingPart] = []
        self._calls: dict[int, _GrowingPart] = {}

    def add(self, event: Event) -> None:
        last = self._parts[-1] if self._parts else None
        match event:
            case TextDelta() | ThinkingDelta():
                if last is None or type(last.event) is not type(event):
                    last = self._begin(event)
                last.pieces.append(event.text)
            case ThinkingEnded(signature) if last and isinstance(last.event, ThinkingDelta):
                last.signature = signature
            case ToolCallStarted():
                self._calls[event.index] = self._begin(event)
            case ToolCallDelta():
                self._calls[event.index].pieces.append(event.arguments)
            case ToolCallEnded():
                self._calls[event.index].is_ended = True
            case _:
                pass

    def message(self) -> Message:
        return Message(Role.ASSISTANT, tuple(growing.part() for growing in self._parts))

    def _begin(self, event: TextDelta | ThinkingDelta | ToolCallStarted) -> _GrowingPart:
        self._parts.append(_GrowingPart(event))
        return self._parts[-1]


def fold_message(events: Iterable[Event]) -> Message:
    """Fold a reply's events into the assistant's message."""
    fold = MessageFold()
    for event in events:
        fold.add(event)
    return fold.message()


def _object(text: str) -> JsonObject:
    """Parse arguments; the splitters emit one JSON object, or nothing."""
    value = json.loads(text or "{}")
    return value if isinstance(value, dict) else {}
