"""Text that has come in and is not decided yet, and who decides it."""

from collections import deque
from collections.abc import Sequence

from semantic.domain.events import Event, ScoredToken, TextDelta


class PendingText:
    """A buffer that keeps log-probabilities with the text they belong to."""

    def __init__(self) -> None:
        self.text = ""
        self._end = 0  # of all text fed, counted from the start
        self._logprobs: deque[tuple[int, tuple[ScoredToken, ...]]] = deque()

    def feed(self, delta: TextDelta) -> None:
        """Append a piece."""
        self.text += delta.text
        self._end += len(delta.text)
        if delta.logprobs:
            self._logprobs.append((self._end, delta.logprobs))

    def take(self, size: int) -> list[TextDelta]:
        """Remove text from the front and return it, with the tokens that end in it, if any."""
        text, logprobs = self.text[:size], self._cut(size)
        return [TextDelta(text, logprobs)] if text else []

    def drop(self, size: int) -> str:
        """Remove text from the front; its tokens are no longer of interest."""
        text = self.text[:size]
        self._cut(size)
        return text

    def _cut(self, size: int) -> tuple[ScoredToken, ...]:
        self.text = self.text[size:]
        reached = self._end - len(self.text)
        tokens: list[ScoredToken] = []
        while self._logprobs and self._logprobs[0][0] <= reached:
            tokens += self._logprobs.popleft()[1]
        return tuple(tokens)


class Splitter:
    """Turns text that comes in pieces into events, holding back what is not decided yet."""

    def __init__(self) -> None:
        self._pending = PendingText()

    def feed(self, delta: TextDelta) -> list[Event]:
        """Take more text."""
        self._pending.feed(delta)
        return self._run(is_final=False)

    def finish(self) -> list[Event]:
        """Decide what is left, at the end of the reply."""
        return self._run(is_final=True)

    def _run(self, *, is_final: bool) -> list[Event]:
        raise NotImplementedError


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the markers begins; of those that begin together, the longest."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    hits = [hit for hit in found if hit[0] >= 0]
    return (min(hits)[0], min(hits)[2]) if hits else None


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a marker.

    Example:
        >>> num_undecided("see <to", ("<tool_call>",))
        3
    """
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
