"""The source of draft tokens: an n-gram index over the past tokens of a tenant's agents.

Each conversation is an array of token ids. The index maps an n-gram to the places where it occurred
before, latest first. The places that share the longest suffix with the current sequence supply the
draft: the tokens that followed there. The model verifies every draft token.

Tenants have separate memories. Together they stay within a fixed number of bytes; the least
recently used tenant loses its oldest conversations first. Used on the device thread only.
"""

import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from semantic.domain.blocks import BlockName, common_prefix
from semantic.domain.images.spans import is_image_id

MEMORY_BYTES: Final = 16 * 2**20
MAX_MATCH: Final = 32  # longer matches do not predict better
_GRAMS = (8, 3)  # n-gram sizes of the index: the lookup tries the long one first
_LENGTHS = (4, 5, 6, 8, 12, 16, 24, MAX_MATCH)  # match lengths that the lookup distinguishes
_MAX_PLACES = 8  # places compared per lookup
_MAX_DRAFT = 48
_SLOTS = 1 << 16
_PLACE_BITS = 24  # low bits of a place: the position; the high bits number the conversation
_NOWHERE = -1
_NO_TOKEN = -1  # in place of the key ids of images, which are no source of draft tokens
_MAX_SHARED = 16  # latest conversations that a new one is compared with
_ID_BYTES, _LINK_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class DraftMatch:
    """Draft tokens and how well they match.

    Attributes:
        length: Length in tokens of the suffix that matched.
        is_unanimous: Whether all places with a match of this length continue with the same token.
    """

    tokens: list[int]
    length: int
    is_unanimous: bool = True


@dataclass(slots=True, eq=False)
class TokenHistory:
    """Indexed tokens of one sequence, including its prompt.

    Attributes:
        first: Length of the prefix shared with another conversation, which indexes those places.
        links: Per n-gram size, for each place from `first` on, the previous place in its hash slot.
    """

    number: int
    agent: str
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    first: int = 0
    links: tuple["array[int]", ...] = field(
        default_factory=lambda: tuple(array("q") for _ in _GRAMS)
    )

    @property
    def nbytes(self) -> int:
        return len(self.tokens) * _ID_BYTES + len(_GRAMS) * len(self.links[0]) * _LINK_BYTES


class TenantMemory:
    """The conversations of one tenant with one model.

    Attributes:
        nbytes: Memory in bytes, including the hash tables.
    """

    def __init__(self) -> None:
        self.nbytes = len(_GRAMS) * _SLOTS * _LINK_BYTES
        self._heads = tuple(array("q", [_NOWHERE]) * _SLOTS for _ in _GRAMS)
        self._conversations: OrderedDict[int, TokenHistory] = OrderedDict()
        self._numbers = itertools.count()

    def begin(self, agent: str, prompt: Sequence[int]) -> TokenHistory:
        """Add a conversation with the prefix of its prompt that a recent conversation shares."""
        best, made = 0, TokenHistory(next(self._numbers), agent)
        whole = _ids(prompt)
        for known in itertools.islice(reversed(self._conversations.values()), _MAX_SHARED):
            best = max(best, common_prefix(known.tokens, whole))
        made.tokens, made.first = whole[:best], best
        self._conversations[made.number] = made
        self.nbytes += made.nbytes
        return made

    def extend(self, conversation: TokenHistory, tokens: Sequence[int]) -> None:
        ids, start = conversation.tokens, len(conversation.tokens)
        ids.extend(_ids(tokens))
        if conversation.number in self._conversations:  # else `forget_oldest` dropped it
            self.nbytes += len(tokens) * (_ID_BYTES + len(_GRAMS) * _LINK_BYTES)
        base = conversation.number << _PLACE_BITS
        for size, heads, links in zip(_GRAMS, self._heads, conversation.links, strict=True):
            for place in range(start, len(ids)):
                if place < size or _NO_TOKEN in ids[place - size : place + 1]:
                    links.append(_NOWHERE)
                    continue
                slot = hash(tuple(ids[place - size : place])) % _SLOTS
                links.append(heads[slot])
                heads[slot] = base + place

    def forget_oldest(self, kept: TokenHistory | None = None) -> bool:
        """Drop the oldest conversation other than `kept`; returns False if there is none."""
        for number, known in self._conversations.items():
            if known is not kept:
                self.nbytes -= self._conversations.pop(number).nbytes
                return True
        return False

    def find_draft(self, tokens: Sequence[int], own: TokenHistory) -> DraftMatch | None:
        """Find draft tokens that may follow `tokens`; None if no n-gram matches.

        `own`, their conversation, may lag behind; it is preferred among equal matches.
        """
        for order, size in enumerate(_GRAMS):
            if len(tokens) >= size and (match := self._find(tokens, order, own)):
                return match
        return None

    def _find(self, tokens: Sequence[int], order: int, own: TokenHistory) -> DraftMatch | None:
        size = _GRAMS[order]
        recent = _ids(tokens[-MAX_MATCH:])
        place = self._heads[order][hash(tuple(recent[-size:])) % _SLOTS]
        best: list[tuple[TokenHistory, int]] = []
        longest = 0
        for _ in range(_MAX_PLACES):
            known = self._conversations.get(place >> _PLACE_BITS) if place >= 0 else None
            if known is None:
                break
            position = place % (1 << _PLACE_BITS)
            length = _shared(known.tokens, position, recent, size)
            if length > longest:
                best, longest = [], length
            if length and length == longest:
                best.append((known, position))
            place = known.links[order][position - known.first]
        return _voted(best, longest, own) if best else None


def _ids(tokens: Sequence[int]) -> "array[int]":
    try:
        return array("i", tokens)
    except OverflowError:
        return array("i", [_NO_TOKEN if is_image_id(token) else token for token in tokens])


def _shared(ids: "array[int]", place: int, recent: "array[int]", size: int) -> int:
    """Length of the recent suffix that also precedes `place`; 0 if shorter than `size`."""
    if ids[place - size : place] != recent[-size:]:
        return 0
    for length in _LENGTHS:
        if length <= size:
            continue
        if length > min(place, len(recent)) or ids[place - length : place] != recent[-length:]:
            break
        size = length
    return size


def _voted(
    places: Sequence[tuple[TokenHistory, int]], length: int, own: TokenHistory
) -> DraftMatch:
    """Take the most common next token; prefer `own`, then its agent, then the latest place."""
    votes = Counter(known.tokens[place] for known, place in places)
    token, _ = votes.most_common(1)[0]
    agreeing = [(known, place) for known, place in places if known.tokens[place] == token]
    known, place = min(agreeing, key=lambda at: (at[0] is not own, at[0].agent != own.agent))
    draft = known.tokens[place : place + _MAX_DRAFT].tolist()
    if _NO_TOKEN in draft:
        draft = draft[: draft.index(_NO_TOKEN)]
    elif known is own and len(draft) < _MAX_DRAFT:
        # The sequence repeats itself and the copy reaches its end: continue the cycle.
        draft = list(itertools.islice(itertools.cycle(draft), _MAX_DRAFT))
    return DraftMatch(draft, length, len(votes) == 1)


class DraftMemory:
    """The memories of all tenants, by the root of their block names."""

    def __init__(self, max_bytes: int = MEMORY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[BlockName, TenantMemory] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._tenants.values())

    def of(self, root: BlockName) -> TenantMemory:
        """Return a tenant's memory, creating it if needed, and mark it as most recently used."""
        if root not in self._tenants:
            self._tenants[root] = TenantMemory()
        self._tenants.move_to_end(root)
        return self._tenants[root]

    def shrink(self, used: TenantMemory, kept: TokenHistory) -> None:
        """Drop the oldest conversations, except `kept`, of the least recently used tenant."""
        while self.nbytes > self._max_bytes:
            root, oldest = next(iter(self._tenants.items()))
            if oldest is not used and not oldest.forget_oldest():
                del self._tenants[root]
            elif oldest is used and not oldest.forget_oldest(kept):
                return
