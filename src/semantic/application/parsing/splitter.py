"""The base class of splitters with its buffer of undecided text, and the splitter of thinking."""

import copy
import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from semantic.domain.events import Event, ScoredToken, TextDelta, ThinkingDelta, ThinkingEnded
from semantic.domain.reply_format import Markers
from semantic.domain.sampling import num_undecided


class PendingText:
    """A text buffer that keeps log-probabilities with the text they belong to."""

    def __init__(self) -> None:
        self.text = ""
        self._end = 0  # number of characters fed in total
        self._logprobs: deque[tuple[int, tuple[ScoredToken, ...]]] = deque()

    def feed(self, delta: TextDelta) -> None:
        self.text += delta.text
        self._end += len(delta.text)
        if delta.logprobs:
            self._logprobs.append((self._end, delta.logprobs))

    def take(self, size: int) -> list[TextDelta]:
        """Remove `size` characters and return them with the tokens that end in them."""
        text, logprobs = self.text[:size], self._cut(size)
        return [TextDelta(text, logprobs)] if text else []

    def drop(self, size: int) -> str:
        """Remove `size` characters and return them, discarding their log-probabilities."""
        text = self.text[:size]
        self._cut(size)
        return text

    def copy(self) -> "PendingText":
        other = copy.copy(self)
        other._logprobs = self._logprobs.copy()
        return other

    def _cut(self, size: int) -> tuple[ScoredToken, ...]:
        self.text = self.text[size:]
        reached = self._end - len(self.text)
        tokens: list[ScoredToken] = []
        while self._logprobs and self._logprobs[0][0] <= reached:
            tokens += self._logprobs.popleft()[1]
        return tuple(tokens)


class Splitter:
    """Turns streamed text into events, holding back text that is not decided yet."""

    def __init__(self) -> None:
        self._pending = PendingText()
        self._is_cut = False  # the reply ended before the model finished it

    def feed(self, delta: TextDelta) -> list[Event]:
        self._pending.feed(delta)
        return self._run(is_final=False)

    def finish(self, *, is_cut: bool) -> list[Event]:
        """Decide the remaining text; `is_cut` if the model did not end the reply itself."""
        self._is_cut = is_cut
        return self._run(is_final=True)

    def copy(self) -> Self:
        other = copy.copy(self)
        other._pending = self._pending.copy()
        return other

    def _run(self, *, is_final: bool) -> list[Event]:
        raise NotImplementedError


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return position and text of the first marker; at the same position, the longest."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    hits = [hit for hit in found if hit[0] >= 0]
    return (min(hits)[0], min(hits)[2]) if hits else None


class _Place(enum.Enum):
    BEFORE = enum.auto()  # thinking may begin here
    INSIDE = enum.auto()
    AFTER = enum.auto()  # what follows is the answer


class ThinkingSplitter(Splitter):
    """Separates thinking from the answer; whitespace next to the markers is dropped.

    Markers are recognised only before the answer begins, since an answer may mention them.
    """

    def __init__(self, markers: Markers, *, is_open: bool, sign: Callable[[], str]) -> None:
        super().__init__()
        self._markers = markers
        self._sign = sign
        self._place = _Place.INSIDE if is_open else _Place.BEFORE
        self._may_repeat_start = is_open
        self._is_after_marker = False
        self._has_thought = False

    @property
    def is_inside(self) -> bool:
        """Whether the next character is part of the thinking."""
        return self._place is _Place.INSIDE

    @property
    def is_over(self) -> bool:
        """Whether the answer has begun; no thinking follows."""
        return self._place is _Place.AFTER

    def _run(self, *, is_final: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            place = self._place
            match place:
                case _Place.BEFORE:
                    self._before(is_final=is_final)
                case _Place.INSIDE:
                    events += self._inside(is_final=is_final)
                case _Place.AFTER:
                    return [*events, *self._pending.take(len(self._pending.text))]
            if place is self._place:
                return events

    def _before(self, *, is_final: bool) -> None:
        text = self._pending.text
        stripped = text.lstrip()
        start = self._markers.start
        if stripped.startswith(start):
            self._pending.drop(len(text) - len(stripped) + len(start))
            self._place, self._may_repeat_start = _Place.INSIDE, False
        elif is_final or not start.startswith(stripped):
            if self._is_after_marker:
                self._pending.drop(len(text) - len(stripped))
            self._place = _Place.AFTER

    def _inside(self, *, is_final: bool) -> list[Event]:
        if not self._has_thought and not self._skip_beginning(is_final=is_final):
            return []
        text, end = self._pending.text, self._markers.end
        found = text.find(end)
        if found >= 0:
            events = self._thought(found)
            self._pending.drop(len(self._pending.text) - len(text) + found + len(end))
            return [*events, *self._end()]
        size = len(text) if is_final else len(text) - num_undecided(text, (end,))
        events = self._thought(size)
        if is_final:
            self._pending.drop(len(self._pending.text))
            events += self._end()
        return events

    def _skip_beginning(self, *, is_final: bool) -> bool:
        """Drop whitespace, and a start marker that repeats the prompt's; False if undecided."""
        text, start = self._pending.text, self._markers.start
        stripped = text.lstrip()
        if self._may_repeat_start and stripped.startswith(start):
            self._may_repeat_start = False
            stripped = stripped[len(start) :].lstrip()
        elif self._may_repeat_start and start.startswith(stripped) and not is_final:
            return False
        self._may_repeat_start = self._may_repeat_start and not stripped
        self._pending.drop(len(text) - len(stripped))
        return True

    def _thought(self, size: int) -> list[Event]:
        size = len(self._pending.text[:size].rstrip())
        text = self._pending.drop(size)
        self._has_thought = self._has_thought or bool(text)
        return [ThinkingDelta(text)] if text else []

    def _end(self) -> list[Event]:
        self._place, self._is_after_marker = _Place.BEFORE, True
        had_thought, self._has_thought = self._has_thought, False
        return [ThinkingEnded(self._sign())] if had_thought else []
