"""Compares consecutive prompts and names the spans that change between them.

Prompts are compared as the bytes of their tokens, so that a span has a position in tokens and a
cost: everything after the first changed token is computed again.
"""

import enum
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate
from typing import TypeAlias

_MAX_LINES = 2_000  # lines compared after the first difference
_MAX_SHOWN = 400  # characters of a text that are kept
_MAX_BETWEEN = 24  # equal bytes between two differences that are shown as one
_NEAR = 150  # bytes of a long line that are shown before and after a span
_MAX_SPANS = 32  # changes between two prompts; more are no repeating pattern
_LINES = re.compile(rb'(?<=\n)|(?<=\}, )(?=\{")')  # tools may share a line
_WORDS = re.compile(rb"\s+|[\w\x80-\xff]+(?:[-:./,\\=+][\w\x80-\xff]+)*|[^\s\w]")
_TOOL_NAME = re.compile(rb'"name": ?"([\w.-]+)"')
_Lines: TypeAlias = Sequence[bytes]


class SpanKind(enum.Enum):
    """What a changing span is."""

    BILLING_HEADER = "billing_header"
    TOOL_ORDER = "tool_order"
    TOOLS = "tools"
    DATE = "date"
    PATH = "path"
    IDENTIFIER = "identifier"
    COUNTER = "counter"
    TEXT = "text"


_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_DAYS = "Mon|Tue|Wed|Thu|Fri|Sat|Sun"
# The first pattern that covers all differences of two lines is the kind of the change.
KIND_PATTERNS: dict[SpanKind, str] = {
    SpanKind.BILLING_HEADER: r"x-anthropic-billing-header:.*",
    SpanKind.DATE: (
        r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}[\d:.]*)?(?:Z|[+-]\d{2}:?\d{2})?"
        r"|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\d{1,2}:\d{2}(?::\d{2})?(?: ?[AaPp][Mm])?"
        rf"|(?:(?:{_DAYS})[a-z]*,? )?(?:(?:{_MONTHS})[a-z]* \d{{1,2}}|"
        rf"\d{{1,2}} (?:{_MONTHS})[a-z]*)(?:,? \d{{4}})?|(?:{_DAYS})[a-z]*day"
    ),
    SpanKind.PATH: r"(?:[A-Za-z]:\\|~?/)[^\s\"'`<>,;:]+",
    SpanKind.IDENTIFIER: (
        r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[\w-]*\d[\w-]{7,}|[0-9a-fA-F]{8,}"
    ),
    SpanKind.COUNTER: r"\d[\d,.]*",
}
_KINDS = {kind: re.compile(pattern) for kind, pattern in KIND_PATTERNS.items()}


@dataclass(frozen=True, slots=True)
class SpanChange:
    """A span that differs between two prompts.

    Attributes:
        index: Number of tokens of the new prompt before the span.
        before: The span in the old prompt; empty if it was inserted.
        after: The span in the new prompt; empty if it was deleted.
        old_line: The line of the span in the old prompt; the names of the tools, if they changed.
        line: The same in the new prompt.
        num_recomputed: Tokens from the span on that could be reused if it had not changed.
    """

    kind: SpanKind
    index: int
    before: str
    after: str
    old_line: str
    line: str
    num_recomputed: int

    @property
    def pattern(self) -> str:
        """The line with the changing part left out; equal for changes of the same span."""
        known = _KINDS.get(self.kind)
        if known is None:
            return "" if self.kind in (SpanKind.TOOL_ORDER, SpanKind.TOOLS) else self.line
        return known.sub("\0", self.line)


@dataclass(frozen=True, slots=True)
class VolatileSpan:
    """A span over several comparisons of consecutive prompts.

    Attributes:
        latest: Its latest change.
        num_changes: Comparisons in which it changed.
        num_compared: All comparisons.
        num_recomputed: Tokens computed again because of it, if it was the first change; over all
            comparisons.
    """

    latest: SpanChange
    num_changes: int
    num_compared: int
    num_recomputed: int

    @property
    def is_volatile(self) -> bool:
        """Whether it changes again and again; otherwise it was edited once."""
        return self.num_changes >= 2 and 2 * self.num_changes >= self.num_compared


def volatile_spans(comparisons: Sequence[Sequence[SpanChange]]) -> tuple[VolatileSpan, ...]:
    """Collect the changes of consecutive comparisons, oldest first, by span.

    Only the first change of a comparison is charged with the tokens that were computed again.
    Returns the spans in the order of their cost, the most expensive first.
    """
    spans: dict[tuple[SpanKind, str], VolatileSpan] = {}
    for changes in comparisons:
        seen: set[tuple[SpanKind, str]] = set()
        for number, change in enumerate(changes):
            key = (change.kind, change.pattern)
            known = spans.get(key)
            cost = change.num_recomputed if number == 0 else 0
            spans[key] = VolatileSpan(
                latest=change,
                num_changes=(known.num_changes if known else 0) + (key not in seen),
                num_compared=len(comparisons),
                num_recomputed=(known.num_recomputed if known else 0) + cost,
            )
            seen.add(key)
    return tuple(
        sorted(
            spans.values(),
            key=lambda span: (-span.num_recomputed, -span.num_changes, span.latest.index),
        )
    )


def compare_prompts(old: _Lines, new: _Lines) -> tuple[SpanChange, ...]:
    """Return the spans of an old prompt that differ in a new one, in the order of the new prompt.

    What one of them has after the end of the other is no change.

    Args:
        old: The bytes of each token of the older conversation.
        new: The same of the newer one.
    """
    comparison = _Comparison(old, new)
    found = [change for change in comparison.changes() if change.before != change.after]
    return tuple(sorted(found, key=lambda change: change.index)[:_MAX_SPANS])


@dataclass(frozen=True, slots=True)
class _Edit:
    """Lines `old` at byte `old_start` became lines `new` at byte `new_start`."""

    old: _Lines
    new: _Lines
    old_start: int
    new_start: int


class _Comparison:
    """Two prompts, as text with the positions of their tokens."""

    def __init__(self, old: _Lines, new: _Lines) -> None:
        self._old, self._new = b"".join(old), b"".join(new)
        self._old_ends = list(accumulate(map(len, old)))
        self._new_ends = list(accumulate(map(len, new)))

    def changes(self) -> Iterator[SpanChange]:
        edits = list(self._edits())
        tools = [edit for edit in edits if _tool_lines(edit.old) or _tool_lines(edit.new)]
        if tools:
            yield self._tool_change(tools)
        for edit in edits:
            if edit not in tools:
                yield from self._word_changes(edit)

    def _edits(self) -> Iterator[_Edit]:
        """Yield the lines that differ, without those that one prompt has after the other's end."""
        if _is_longer(self._old, self._new):
            return
        old, new = _LINES.split(self._old), _LINES.split(self._new)
        same = _num_common(old, new)
        start = sum(map(len, old[:same]))
        old, new = old[same:][:_MAX_LINES], new[same:][:_MAX_LINES]
        old_starts = [start, *(start + end for end in accumulate(map(len, old)))]
        new_starts = [start, *(start + end for end in accumulate(map(len, new)))]
        matcher = SequenceMatcher(None, old, new)
        for tag, i, i_end, j, j_end in matcher.get_opcodes():
            is_last = i_end == len(old) and j_end == len(new)
            if tag == "equal" or (is_last and _is_longer(b"".join(old[i:]), b"".join(new[j:]))):
                continue
            yield _Edit(old[i:i_end], new[j:j_end], old_starts[i], new_starts[j])

    def _word_changes(self, edit: _Edit) -> Iterator[SpanChange]:
        old, new = _words(edit.old), _words(edit.new)
        old_at = [edit.old_start, *(edit.old_start + n for n in accumulate(map(len, old)))]
        new_at = [edit.new_start, *(edit.new_start + n for n in accumulate(map(len, new)))]
        for i, i_end, j, j_end in _merged(old, SequenceMatcher(None, old, new)):
            at_end = old_at[i_end] == len(self._old) and new_at[j_end] == len(self._new)
            if at_end and (i == i_end or j == j_end):
                continue
            before, after = b"".join(old[i:i_end]), b"".join(new[j:j_end])
            lines = (
                _line_around(self._old, old_at[i], old_at[i_end]),
                _line_around(self._new, new_at[j], new_at[j_end]),
            )
            kind = _kind(*lines) or _kind(before, after) or SpanKind.TEXT
            yield self._change(kind, old_at[i], new_at[j], (before, after), lines)

    def _tool_change(self, edits: Sequence[_Edit]) -> SpanChange:
        old = [tool for edit in edits for tool in _tool_lines(edit.old)]
        new = [tool for edit in edits for tool in _tool_lines(edit.new)]
        is_order = Counter(old) == Counter(new)
        names = tuple(b", ".join(_name(tool) for tool in tools) for tools in (old, new))
        first = edits[0]
        kind = SpanKind.TOOL_ORDER if is_order else SpanKind.TOOLS
        texts = (names[0], names[1])
        return self._change(kind, first.old_start, first.new_start, texts, texts)

    def _change(
        self,
        kind: SpanKind,
        old_at: int,
        new_at: int,
        texts: tuple[bytes, bytes],
        lines: tuple[bytes, bytes],
    ) -> SpanChange:
        index = bisect_right(self._new_ends, new_at)
        num_lost = len(self._old_ends) - bisect_right(self._old_ends, old_at)
        return SpanChange(
            kind,
            index,
            before=_shown(texts[0]),
            after=_shown(texts[1]),
            old_line=_shown(lines[0]),
            line=_shown(lines[1]),
            num_recomputed=min(num_lost, len(self._new_ends) - index),
        )


def _merged(
    old: Sequence[bytes], matcher: "SequenceMatcher[bytes]"
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the words that differ; differences with little between them in a line are one."""
    pending: tuple[int, int, int, int] | None = None
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            between = b"".join(old[i:i_end])
            if pending and (b"\n" in between or len(between) > _MAX_BETWEEN):
                yield pending
                pending = None
            continue
        pending = (pending[0], i_end, pending[2], j_end) if pending else (i, i_end, j, j_end)
    if pending:
        yield pending


def _is_longer(one: bytes, other: bytes) -> bool:
    """Whether one of two texts is the other with more at its end."""
    return one.startswith(other) or other.startswith(one)


def _num_common(old: _Lines, new: _Lines) -> int:
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(old), len(new)))


def _words(lines: _Lines) -> list[bytes]:
    return _WORDS.findall(b"".join(lines))


def _line_around(text: bytes, start: int, end: int) -> bytes:
    """Return the line of a span; of a long line, what is near the span."""
    first = max(text.rfind(b"\n", 0, start) + 1, start - _NEAR)
    last = text.find(b"\n", end)
    return text[first : min(last if last >= 0 else len(text), end + _NEAR)]


def _tool_lines(lines: _Lines) -> list[bytes]:
    return [line.strip(b" ,[]\n") for line in lines if _is_tool(line)]


def _is_tool(line: bytes) -> bool:
    return bool(_TOOL_NAME.search(line)) and (b'"parameters"' in line or b'"description"' in line)


def _name(tool: bytes) -> bytes:
    found = _TOOL_NAME.search(tool)
    return found[1] if found else b""


def _kind(before: bytes, after: bytes) -> SpanKind | None:
    """Return the kind that covers all differences of two texts; None if there is none."""
    old, new = _shown(before), _shown(after)
    for kind, pattern in _KINDS.items():
        if pattern.search(new) and pattern.sub("", old) == pattern.sub("", new):
            return kind
    return None


def _shown(text: bytes) -> str:
    return text[: 4 * _MAX_SHOWN].decode("utf-8", "replace")[:_MAX_SHOWN]
