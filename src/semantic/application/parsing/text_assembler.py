"""Turns sampled tokens into text, before the text is split into thinking, answer and tool calls."""

import codecs
from collections.abc import Callable, Mapping, Sequence

from semantic.domain.events import ScoredToken, TextDelta
from semantic.domain.sampling import StopMatcher, TokenLogprob


class TextAssembler:
    """Turns sampled tokens into text that is safe to emit. Not thread-safe; one per request.

    Works on bytes: it holds back a character that is split over tokens until it is complete, and
    loses no spaces. The joined pieces equal the decoding of all tokens, without the stop string.

    Special tokens produce no text, except the `visible` ones, which the reply's parser needs.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stops: Sequence[str] = (),
        visible: Mapping[int, bytes] | None = None,
    ) -> None:
        self._plain_bytes = token_bytes
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

    def finish(self) -> TextDelta | None:
        """Return the text held back so far; call it after the last token."""
        if self.stop is not None:
            return None
        text = self._matcher.feed(self._decoder.decode(b"", final=True))
        return self._delta(text + self._matcher.flush())

    def _delta(self, text: str) -> TextDelta | None:
        if not text:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextDelta(text, logprobs)

    def _token_bytes(self, token: int) -> bytes:
        return self._visible.get(token) or self._plain_bytes(token)

    def _scored(self, logprob: TokenLogprob) -> ScoredToken:
        top = tuple((self._token_bytes(token), value) for token, value in logprob.top)
        return ScoredToken(self._token_bytes(logprob.token), logprob.logprob, top)
