"""Workloads for the simulation of retention: when which agent takes a turn, and on which tokens.

Each workload is a function of a seed. A prompt consists of *grains* of 256 tokens each, so that the
simulation of a day takes seconds.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

GRAIN = 256
_HOUR, _DAY = 3600.0, 86400.0
_LONGEST = 80_000 // GRAIN  # clients start anew, or compact, before a conversation is longer


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """A turn of a trace.

    Attributes:
        at: Seconds since midnight of the first day.
        prompt: The whole prompt, which begins with `num_head` grains of system prompt and tools.
    """

    at: float
    agent: str
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    num_head: int


class _Talk:
    """A conversation that grows turn by turn."""

    def __init__(self, world: "_World", agent: str, head: tuple[int, ...]) -> None:
        self._world = world
        self.agent = f"{agent}-{next(world.names)}"
        self.head = head
        self.tokens = list(head)

    def turn(self, at: float, num_added: int, num_reply: int) -> None:
        """Take a turn that adds so many tokens."""
        self.tokens += self._world.grains(num_added)
        prompt, reply = tuple(self.tokens), self._world.grains(num_reply)
        self._world.turns.append(TraceTurn(at, self.agent, prompt, reply, len(self.head)))
        self.tokens += reply

    def fork(self) -> "_Talk":
        made = _Talk(self._world, self.agent, self.head)
        made.tokens = list(self.tokens)
        return made

    @property
    def is_full(self) -> bool:
        return len(self.tokens) > _LONGEST


class _World:
    """Collects the turns of all agents of a workload."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.turns: list[TraceTurn] = []
        self.names = itertools.count()
        self._ids = itertools.count(1)

    def grains(self, num_tokens: int) -> tuple[int, ...]:
        """Return new tokens, rounded at random to whole grains, at least one."""
        count = max(1, int(num_tokens / GRAIN + self.rng.random()))
        return tuple(itertools.islice(self._ids, count))

    def pause(self, median_s: float, sigma: float = 1.0) -> float:
        return median_s * math.exp(self.rng.gauss(0.0, sigma))

    def burst(self, talk: _Talk, at: float, num_turns: int, gap_s: float, added: int) -> float:
        """Take several turns, as with tools; returns when the last one began."""
        for _ in range(num_turns):
            if talk.is_full:
                break
            talk.turn(at, self.rng.randint(100, added), self.rng.randint(50, 400))
            at += self.pause(gap_s)
        return at

    def sorted(self) -> list[TraceTurn]:
        return sorted(self.turns, key=lambda turn: turn.at)


# -- workloads -------------------------------------------------------------------------------------


def _coders(world: _World, num_agents: int, num_days: int) -> None:
    """Coding agents at work from nine to six: bursts of tool calls, pauses, sessions left behind.

    Agents of one client share its system prompt and tools. Some bursts start a sub-agent that ends
    with its task, and each new session asks for a title once.
    """
    rng = world.rng
    heads = [world.grains(rng.randint(12_000, 20_000)) for _ in range(4)]
    helper, title = world.grains(5000), world.grains(400)
    for number in range(num_agents):
        head, talk = heads[number % len(heads)], None
        for day in range(num_days):
            at = day * _DAY + 9 * _HOUR + rng.uniform(0, _HOUR)
            while at < day * _DAY + 18 * _HOUR:
                if talk is None or talk.is_full or rng.random() < 0.3:
                    talk = _Talk(world, f"coder-{number}", head)
                    _Talk(world, "title", title).turn(at, 500, 20)
                at = world.burst(talk, at, 2 + int(rng.expovariate(1 / 8)), 8.0, 2000)
                if rng.random() < 0.25:
                    sub = _Talk(world, f"sub-{number}", helper)
                    at = world.burst(sub, at, rng.randint(3, 8), 5.0, 2500)
                    at = world.burst(talk, at, 2, 8.0, 1500)
                at += world.pause(12 * 60, 1.2)


def _assistants(world: _World, num_agents: int, num_days: int, num_head: int) -> None:
    """Assistants with a long prompt who are asked now and then, all day."""
    for number in range(num_agents):
        talk = _Talk(world, f"assistant-{number}", world.grains(num_head))
        for day in range(num_days):
            at = day * _DAY + 8 * _HOUR + world.rng.uniform(0, _HOUR)
            while at < day * _DAY + 22 * _HOUR:
                at = world.burst(talk, at, world.rng.randint(1, 3), 60.0, 800)
                at += world.pause(25 * 60)
                if talk.is_full:
                    talk = _Talk(world, f"assistant-{number}", talk.head)


def _nightly(world: _World, num_jobs: int, num_days: int) -> None:
    """Jobs that start at two o'clock, each anew with its own long prompt."""
    heads = [world.grains(world.rng.randint(13_000, 25_000)) for _ in range(num_jobs)]
    for day, (number, head) in itertools.product(range(num_days), enumerate(heads)):
        at = day * _DAY + 2 * _HOUR + 300.0 * number + world.rng.uniform(0, 60)
        world.burst(_Talk(world, f"job-{number}", head), at, 6, 20.0, 2000)


def _chats(world: _World, num_days: int, every_s: float) -> None:
    """Short chats that most people leave after one answer."""
    head, at = world.grains(500), 0.0
    while at < num_days * _DAY:
        at += world.rng.expovariate(1 / every_s)
        talk, when = _Talk(world, "chat", head), at
        talk.turn(when, world.rng.randint(500, 4000), world.rng.randint(100, 800))
        while world.rng.random() < 0.3:
            when += world.pause(60.0)
            talk.turn(when, world.rng.randint(50, 500), world.rng.randint(100, 800))


def _forks(world: _World, num_projects: int, num_days: int) -> None:
    """Searches: eight branches of a root take three turns each; the best one is the next root."""
    rng = world.rng
    for number in range(num_projects):
        first = _Talk(world, f"project-{number}", world.grains(20_000))
        root, old = first, [first]
        at = 9 * _HOUR + rng.uniform(0, 600)
        while at < num_days * _DAY:
            branches = [root.fork() for _ in range(8)]
            ends = [world.burst(b, at + rng.uniform(0, 60), 3, 10.0, 1500) for b in branches]
            old.append(rng.choice(branches))
            root = rng.choice(old) if rng.random() < 0.2 else old[-1]
            root = first if root.is_full else root
            at = max(ends) + world.pause(15 * 60)


def _mixed(world: _World) -> None:
    _coders(world, 5, 2)
    _assistants(world, 2, 2, 30_000)
    _nightly(world, 8, 2)
    _chats(world, 2, 400.0)
    _forks(world, 1, 1)


def _pollution(world: _World) -> None:
    _assistants(world, 4, 1, 30_000)
    _chats(world, 1, 90.0)


def _nights_and_days(world: _World) -> None:
    _assistants(world, 6, 3, 20_000)
    _nightly(world, 24, 3)


WORKLOADS: dict[str, Callable[[_World], None]] = {
    "twelve coding agents": lambda world: _coders(world, 12, 2),
    "assistants and nightly jobs": _nights_and_days,
    "long-lived agents and one-off chats": _pollution,
    "forks of shared roots": lambda world: _forks(world, 4, 1),
    "all of these": _mixed,
}


def trace(name: str, seed: int, num_turns: int | None = None) -> list[TraceTurn]:
    """Return the turns of a workload in the order of their times, or its first ones."""
    world = _World(Random(f"{name} {seed}"))  # noqa: S311 - a simulation
    WORKLOADS[name](world)
    return world.sorted()[:num_turns]
