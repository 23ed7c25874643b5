"""Reading the beginning of a call, which may not all be there yet."""

_MAX_STRING = 256
_SPACE = " \t\r\n"


class NeedMore(Exception):  # noqa: N818 - a state, not an error
    """What is there fits so far."""


class NoCall(Exception):  # noqa: N818 - a finding, not an error
    """What is there is no call."""


class Cursor:
    """A place in a text.

    Every method raises `NeedMore` at the text's end, so no answer depends on how much of it has
    come in yet.
    """

    def __init__(self, text: str, at: int = 0) -> None:
        self._text = text
        self.at = at

    def peek(self) -> str:
        """The next character."""
        if self.at >= len(self._text):
            raise NeedMore
        return self._text[self.at]

    def space(self) -> None:
        """Pass over whitespace, up to something else."""
        while self.peek() in _SPACE:
            self.at += 1

    def literal(self, text: str) -> None:
        """Pass over exactly this."""
        for char in text:
            if self.peek() != char:
                raise NoCall
            self.at += 1

    def string(self) -> str:
        """Read a short JSON string without escapes: a name or a key."""
        self.literal('"')
        return self.until('"')

    def until(self, stops: str) -> str:
        """Read up to one of these characters and pass over it."""
        start = self.at
        while self.peek() not in stops:
            if self._text[self.at] in "\\\n" or self.at - start > _MAX_STRING:
                raise NoCall
            self.at += 1
        self.at += 1
        return self._text[start : self.at - 1]
