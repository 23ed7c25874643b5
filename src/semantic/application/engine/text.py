"""From sampled tokens to text that may be shown.

Works on bytes, so that a character split over tokens is held until it is whole and spaces are
never lost; the pieces joined are exactly the decoding of all tokens. Stop strings are cut out.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence

from semantic.domain.events import ScoredToken, TextDelta
from semantic.domain.sampling import StopMatcher, TokenLogprob


class TextAssembler:
    """The text of one reply. Not thread-safe; one per request.

    Special tokens are no text, except the `visible` ones: those the reply's parser looks for.

    Attributes:
        stop: The stop string that was hit, if any; nothing more may be fed then.
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
        self.stop: str | None = None

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> TextDelta | None:
        """Take a token; returns the text that became certain, if any."""
        if logprob is not None:
            self._logprobs.append(self._scored(logprob))
        match = self._matcher.feed(self._decoder.decode(self._token_bytes(token)))
        self.stop = match.stop
        return self._delta(match.text)

    def finish(self) -> TextDelta | None:
        """Return what was held back, once no token follows."""
        if self.stop is not None:
            return None
        match = self._matcher.feed(self._decoder.decode(b"", final=True))
        self.stop = match.stop
        return self._delta(match.text if match.stop else match.text + self._matcher.flush())

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
