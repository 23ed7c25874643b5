"""Decides whether a reply answers a question, however it is worded."""

import re

from training.questions import Question
from training.vocabulary import COLOURS, PLURALS

_PLACES = ("top", "bottom", "left", "right", "middle", "above", "below")
_ALIKE = {
    **{many: one for one, many in PLURALS.items()},
    **dict.fromkeys(("no", "not", "none", "zero", "0"), "no"),
    **{word: str(number) for number, word in enumerate(("one", "two", "three", "four", "five"), 1)},
    "grey": "gray",
}
_CLOSED = {*COLOURS, *PLURALS, *_PLACES, "yes", "no"}


def is_right(question: Question, reply: str) -> bool:
    """Whether a reply says what the answer says, and nothing else about it.

    What counts are colours, shapes, places, numbers, yes and no, and quoted texts. Words of the
    question may be repeated or left out.
    """
    asked = set(_facts(question.text))
    return _news(reply, asked) == _news(question.answer, asked)


def _news(text: str, asked: set[str]) -> list[str]:
    return [fact for fact in _facts(text) if fact not in asked]


def _facts(text: str) -> list[str]:
    """The facts of a text, in order; a quoted text is one, with its case."""
    quoted = re.findall(r'"([^"]*)"', text)
    words = re.findall(r"[a-z]+|[0-9]+", re.sub(r'"[^"]*"', " ", text).lower())
    alike = (_ALIKE.get(word, word) for word in words)
    found = [word for word in alike if word in _CLOSED or word.isdigit()]
    return quoted + [word for i, word in enumerate(found) if word != "no" or "no" not in found[:i]]
