"""Where guesses come from: what the agents of a tenant said and read, found by the last tokens.

Each conversation is kept as a row of token ids. A run of a few tokens leads to the places where it
stood before, the latest first; those that share most with what was written last say what may come
next. Nothing here knows whether a guess is right: the model checks each.

Memories of tenants are apart. All of them together stay within a fixed number of bytes; what was
not used for longest goes first. On the engine's thread.
"""

import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from semantic.domain.blocks import BlockName, common_prefix

MEMORY_BYTES: Final = 16 * 2**20
MAX_MATCH: Final = 32  # a longer match says no more
_GRAMS = (8, 3)  # tokens by which places are found: a long run first, else a short one
_LENGTHS = (4, 5, 6, 8, 12, 16, 24, MAX_MATCH)  # of matches that are told apart
_MAX_PLACES = 8  # that are looked at for one guess
_MAX_GUESS = 48
_SLOTS = 1 << 16
_PLACE_BITS = 24  # of a place's number, the position; the rest is the conversation
_NOWHERE = -1
_MAX_SHARED = 16  # conversations that a new one is compared with
_ID_BYTES, _LINK_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class DraftMatch:
    """What may come next.

    Attributes:
        tokens: The guess.
        length: Tokens before it that are the same there and here.
        is_unanimous: Whether all places with such a match go on with its first token.
    """

    tokens: list[int]
    length: int
    is_unanimous: bool = True


@dataclass(slots=True, eq=False)
class TokenHistory:
    """Tokens of one sequence, those of its prompt included.

    Attributes:
        first: Before this it is like another conversation, by which those places are found.
        links: By length of run: from each place, from `first` on, to the one before it.
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
        """Memory of its tokens and links."""
        return len(self.tokens) * _ID_BYTES + len(_GRAMS) * len(self.links[0]) * _LINK_BYTES


class TenantMemory:
    """The conversations of one tenant with one model.

    Attributes:
        nbytes: What it takes, tables included.
    """

    def __init__(self) -> None:
        self.nbytes = len(_GRAMS) * _SLOTS * _LINK_BYTES
        self._heads = tuple(array("q", [_NOWHERE]) * _SLOTS for _ in _GRAMS)
        self._conversations: OrderedDict[int, TokenHistory] = OrderedDict()
        self._numbers = itertools.count()

    def begin(self, agent: str, prompt: Sequence[int]) -> TokenHistory:
        """Begin a conversation, with as much of its prompt as others begin with."""
        best, made = 0, TokenHistory(next(self._numbers), agent)
        whole = array("i", prompt)
        for known in itertools.islice(reversed(self._conversations.values()), _MAX_SHARED):
            best = max(best, common_prefix(known.tokens, whole))
        made.tokens, made.first = whole[:best], best
        self._conversations[made.number] = made
        self.nbytes += made.nbytes
        return made

    def extend(self, conversation: TokenHistory, tokens: Sequence[int]) -> None:
        """Add tokens to a conversation's end; mutates it."""
        ids, start = conversation.tokens, len(conversation.tokens)
        ids.extend(tokens)
        if conversation.number in self._conversations:  # else it was forgotten while it went on
            self.nbytes += len(tokens) * (_ID_BYTES + len(_GRAMS) * _LINK_BYTES)
        base = conversation.number << _PLACE_BITS
        for size, heads, links in zip(_GRAMS, self._heads, conversation.links, strict=True):
            for place in range(start, len(ids)):
                if place < size:
                    links.append(_NOWHERE)
                    continue
                slot = hash(tuple(ids[place - size : place])) % _SLOTS
                links.append(heads[slot])
                heads[slot] = base + place

    def forget_oldest(self, kept: TokenHistory | None = None) -> bool:
        """Drop the conversation that began first, but not `kept`; False if there is none."""
        for number, known in self._conversations.items():
            if known is not kept:
                self.nbytes -= self._conversations.pop(number).nbytes
                return True
        return False

    def find(self, tokens: Sequence[int], own: TokenHistory) -> DraftMatch | None:
        """Guess what follows `tokens`, of which `own` holds all it has been given."""
        for order, size in enumerate(_GRAMS):
            if len(tokens) >= size and (match := self._find(tokens, order, own)):
                return match
        return None

    def _find(self, tokens: Sequence[int], order: int, own: TokenHistory) -> DraftMatch | None:
        size = _GRAMS[order]
        recent = array("i", tokens[-MAX_MATCH:])
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


def _shared(ids: "array[int]", place: int, recent: "array[int]", size: int) -> int:
    """How many tokens before a place are the recent ones; 0 if fewer than `size`."""
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
    """Go on as most places do; of those, as the sequence itself, its agent, or the latest did."""
    votes = Counter(known.tokens[place] for known, place in places)
    token, _ = votes.most_common(1)[0]
    agreeing = [(known, place) for known, place in places if known.tokens[place] == token]
    known, place = min(agreeing, key=lambda at: (at[0] is not own, at[0].agent != own.agent))
    guess = known.tokens[place : place + _MAX_GUESS].tolist()
    if known is own and len(guess) < _MAX_GUESS:
        # It repeats itself, and will do so at the end of what it has said so far.
        guess = list(itertools.islice(itertools.cycle(guess), _MAX_GUESS))
    return DraftMatch(guess, length, len(votes) == 1)


class DraftMemory:
    """All tenants' memories, by the root of their block names."""

    def __init__(self, max_bytes: int = MEMORY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[BlockName, TenantMemory] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """What all of them take."""
        return sum(memory.nbytes for memory in self._tenants.values())

    def of(self, root: BlockName) -> TenantMemory:
        """A tenant's memory, which counts as used now."""
        if root not in self._tenants:
            self._tenants[root] = TenantMemory()
        self._tenants.move_to_end(root)
        return self._tenants[root]

    def shrink(self, used: TenantMemory, kept: TokenHistory) -> None:
        """Forget what was not used for longest until the rest fits, but not `kept`."""
        while self.nbytes > self._max_bytes:
            root, oldest = next(iter(self._tenants.items()))
            if oldest is not used and not oldest.forget_oldest():
                del self._tenants[root]
            elif oldest is used and not oldest.forget_oldest(kept):
                return
