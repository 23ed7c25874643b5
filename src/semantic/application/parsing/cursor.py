"""A position in streamed text that raises an exception where more text is needed to decide."""

from collections.abc import Sequence

from semantic.domain.reply_format import SLOT

_MAX_STRING = 256
SPACE = " \t\r\n"


class NeedMore(Exception):  # noqa: N818 - a state, not an error
    """Raised if the text is valid so far and more is needed to decide."""


class NoCall(Exception):  # noqa: N818 - a finding, not an error
    """Raised if text that looked like a call is not one."""


class Cursor:
    """A position in a text.

    Every method raises `NeedMore` at the end of the text, so no result depends on how much text has
    arrived.
    """

    def __init__(self, text: str, at: int = 0) -> None:
        self._text = text
        self.at = at

    def peek(self) -> str:
        if self.at >= len(self._text):
            raise NeedMore
        return self._text[self.at]

    def space(self) -> None:
        while self.peek() in SPACE:
            self.at += 1

    def literal(self, text: str) -> None:
        """Pass over `text`; raises `NoCall` if something else follows."""
        for char in text:
            if self.peek() != char:
                raise NoCall
            self.at += 1

    def phrase(self, text: str) -> None:
        """Pass over `text` with any white space before and between its words."""
        for word in text.split():
            self.space()
            first, *others = word.split(SLOT)
            self.literal(first)
            for part in others:
                while self.peek().isalnum() or self.peek() in "_-":
                    self.at += 1
                self.literal(part)

    def skip(self, text: str, junk: str) -> None:
        """Pass over junk, and over `text` if it follows."""
        while self.peek() in junk:
            self.at += 1
        if self.starts(text):
            self.at += len(text)

    def require(self, texts: Sequence[str]) -> None:
        """Check that one of these texts follows, without passing over it."""
        rest = self._text[self.at : self.at + max(map(len, texts), default=0)]
        if not any(map(rest.startswith, texts)):
            raise NeedMore if any(text.startswith(rest) for text in texts) else NoCall

    def string(self) -> str:
        """Read a short JSON string without escapes: a name or a key."""
        self.literal('"')
        return self.until('"')

    def starts(self, text: str) -> bool:
        """Whether `text` follows; raises `NeedMore` if that is not decided yet."""
        try:
            self.require((text,))
        except NoCall:
            return False
        return True

    def scalar(self) -> str:
        """Read a short JSON string, or a number or literal as it is written."""
        if self.peek() == '"':
            return self.string()
        return self.word(set(",}]"))

    def word(self, stops: set[str]) -> str:
        """Read up to white space or one of these characters; raises `NoCall` if it is empty."""
        start = self.at
        while self.peek() not in stops and not self.peek().isspace():
            if self.at - start > _MAX_STRING:
                raise NoCall
            self.at += 1
        if self.at == start:
            raise NoCall
        return self._text[start : self.at]

    def until(self, stops: str) -> str:
        """Read up to one of these characters, and pass over it.

        Raises `NoCall` at a backslash or line break, and if the result would be too long.
        """
        start = self.at
        while self.peek() not in stops:
            if self._text[self.at] in "\\\n" or self.at - start > _MAX_STRING:
                raise NoCall
            self.at += 1
        self.at += 1
        return self._text[start : self.at - 1]
