"""Simulates fleets of 1 to 1,000 servers: where KV cache is found, and what that costs.

Agents send turns; a proxy sends each turn to the agent's own server or another one. That server
has a prefix in memory and a longer one on disk, the object store has everything, and the server
computes the rest. As in the real server, it computes what a tier would deliver more slowly. Costs
per token are measured (see `DEVICES`); links and sizes vary. Not simulated: decoding, uploads in
progress, and the few milliseconds that a proxy and PostgreSQL add to each turn.
"""

import heapq
import random
import sys
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from statistics import median, quantiles

from benchmarks.report import Report, run

BLOCK = 256
HEAD, NUM_HEADS = 2048, 8  # tokens of a system prompt, and how many there are
FIRST, MORE = 2000, 800  # tokens of an agent's own: at first, and with each turn
# Agents that fit 10.2 GB at 16 bits over those at fewer: `bench_memory`, Llama 3.1 8B of 4k.
SMALLER = {16: 1.0, 8: 38 / 20, 4: 72 / 20}
TIERS = ("memory", "disk", "store", "computed")


@dataclass(frozen=True, slots=True)
class Device:
    """Measurements of one server (docs/benchmark-notes.md), in seconds per token except `turn_s`.

    Attributes:
        turn_s: Time of a turn whose whole KV cache is in memory.
        agents: Agents per server, with `think_s` between their turns.
    """

    title: str
    turn_s: float
    prefill_s: float
    memory_s: float
    disk_s: float
    token_bytes: int
    agents: int
    think_s: float


DEVICES = {
    # "The server on one H200, over HTTP", last column: hot 0.051 s, cold 1.40, pool 0.17 and
    # disk (page cache) 0.41 s for 30,720 tokens. Bytes: EXP-001.
    "h200": Device(
        title="8B in bfloat16 on one H200",
        turn_s=0.051,
        prefill_s=(1.40 - 0.051) / 30720,
        memory_s=(0.17 - 0.051) / 30720,
        disk_s=(0.41 - 0.051) / 30720,
        token_bytes=131072,
        agents=40,
        think_s=30.0,
    ),
    # "Agent memory, SmolLM2-135M", 4,096 tokens: hot 0.095 s, cold 4.36, pool 0.19, disk 0.205.
    "arm": Device(
        title="135M on two Neoverse N1 cores",
        turn_s=0.095,
        prefill_s=(4.36 - 0.095) / 4096,
        memory_s=(0.19 - 0.095) / 4096,
        disk_s=(0.205 - 0.095) / 4096,
        token_bytes=23040,
        agents=10,
        think_s=300.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The parameters that vary.

    Attributes:
        affinity: The share of turns that the proxy sends to the agent's own server.
        is_bounded: Whether a turn goes to another server while its own is busy for longer than a
            turn takes, as with the router of `semantic cluster`.
    """

    replicas: int = 100
    affinity: float = 1.0
    is_bounded: bool = True
    memory_gb: float = 40.0
    disk_gb: float = 400.0
    link_gbit: float = 10.0
    kv_bits: int = 16

    @property
    def routing(self) -> str:
        share = f"{self.affinity:.0%}"
        return f"{share}, unless busy" if self.is_bounded else share


class Tier:
    """Prefixes that a server has, by owner; evicts the least recently used."""

    def __init__(self, max_tokens: float) -> None:
        self._room = max_tokens
        self._prefixes: OrderedDict[int, int] = OrderedDict()

    def find(self, key: int) -> int:
        """Return how many tokens of the prefix are present."""
        if key in self._prefixes:
            self._prefixes.move_to_end(key)
        return self._prefixes.get(key, 0)

    def keep(self, key: int, num_tokens: int) -> None:
        self._room += self._prefixes.pop(key, 0) - num_tokens
        self._prefixes[key] = num_tokens
        while self._room < 0:
            self._room += self._prefixes.popitem(last=False)[1]


@dataclass
class Outcome:
    """The result of a simulation; seconds are those to the first token."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    num_turns: int = 0
    down_bytes: float = 0.0
    up_bytes: float = 0.0
    seconds: list[float] = field(default_factory=list)
    span_s: float = 0.0

    def figures(self, fleet: Fleet) -> dict[str, tuple[float, str]]:
        total = sum(self.tokens.values())
        shares = {name: (100 * self.tokens[name] / total, "%") for name in TIERS}
        rate = 8e-9 * (self.down_bytes + self.up_bytes) / self.span_s
        return {
            **shares,
            "down a turn": (self.down_bytes / self.num_turns / 1e6, "MB"),
            "up a turn": (self.up_bytes / self.num_turns / 1e6, "MB"),
            "traffic": (rate, "Gbit/s"),
            "traffic, a server": (rate / fleet.replicas, "Gbit/s"),
            "first token, p50": (1000 * median(self.seconds), "ms"),
            "first token, p99": (1000 * quantiles(self.seconds, n=100)[-1], "ms"),
        }


class Simulation:
    """One fleet with its agents; a server is an index into the lists."""

    def __init__(self, fleet: Fleet, device: Device, seed: int) -> None:
        self._fleet, self._device = fleet, device
        self._random = random.Random(seed)  # noqa: S311 - a simulation
        rest = device.token_bytes / SMALLER[fleet.kv_bits]
        self._rest_bytes = rest
        servers = range(fleet.replicas)
        self._memory = [Tier(fleet.memory_gb * 1e9 / device.token_bytes) for _ in servers]
        self._disk = [Tier(fleet.disk_gb * 1e9 / rest) for _ in servers]
        self._free_at = [0.0] * fleet.replicas
        self._stored: dict[int, int] = {}
        agents = range(fleet.replicas * device.agents)
        self._own = [self._random.randrange(fleet.replicas) for _ in agents]  # as a hash spreads
        link_s = rest / (fleet.link_gbit * 1e9 / 8)
        costs = {"memory": device.memory_s, "disk": device.disk_s, "store": link_s}
        # What is slower than computing is not asked for.
        self._costs = {n: cost for n, cost in costs.items() if cost < device.prefill_s}
        self._costs["computed"] = device.prefill_s
        self.outcome = Outcome()

    def run(self, turns: int) -> Outcome:
        """Run this many turns of each agent; the first quarter of the time does not count."""
        device = self._device
        agents = range(len(self._own))
        end = turns * device.think_s
        start = end / 4
        waiting = [(self._random.uniform(0, device.think_s), agent) for agent in agents]
        heapq.heapify(waiting)
        while waiting[0][0] < end:
            now, agent = waiting[0]
            reply_at = self._turn(agent, now, is_counted=now > start)
            pause = self._random.expovariate(1 / device.think_s)
            heapq.heapreplace(waiting, (reply_at + pause, agent))
        self.outcome.span_s = end - start
        return self.outcome

    def _choose(self, agent: int, now: float) -> int:
        fleet, free_at = self._fleet, self._free_at
        own = self._own[agent]
        is_free = free_at[own] - now < self._device.turn_s
        if self._random.random() < fleet.affinity and (is_free or not fleet.is_bounded):
            return own
        one, two = (self._random.randrange(fleet.replicas) for _ in range(2))
        return one if free_at[one] <= free_at[two] else two

    def _turn(self, agent: int, now: float, *, is_counted: bool) -> float:
        """Run a turn; returns the time of its first token."""
        server = self._choose(agent, now)
        head, before = -1 - agent % NUM_HEADS, self._stored.get(agent, 0)
        length = before + MORE if before else FIRST
        found = dict.fromkeys(TIERS, 0)
        self._find(server, head, HEAD, self._stored.get(head, 0), found)
        self._find(server, agent, length, before, found)
        restore_s = sum(found[name] * cost for name, cost in self._costs.items())
        begin = max(now, self._free_at[server])
        self._free_at[server] = begin + found["computed"] * self._costs["computed"]
        reply_at = begin + self._device.turn_s + restore_s
        if is_counted:
            self._count(found, reply_at - now, length - before // BLOCK * BLOCK)
        self._stored[head], self._stored[agent] = HEAD, length
        return reply_at

    def _find(self, server: int, key: int, length: int, stored: int, found: dict[str, int]) -> None:
        """Look up one prefix tier by tier; afterwards the server has all of it."""
        tiers = {"memory": self._memory[server], "disk": self._disk[server]}
        reached = 0
        for name in TIERS:
            have = tiers[name].find(key) if name in tiers else stored
            if name == "computed":
                have = length
            if name in self._costs and have > reached:
                found[name] += have - reached
                reached = have
        for tier in tiers.values():
            tier.keep(key, length)

    def _count(self, found: dict[str, int], seconds: float, num_new: int) -> None:
        outcome = self.outcome
        outcome.num_turns += 1
        outcome.seconds.append(seconds)
        outcome.down_bytes += found["store"] * self._rest_bytes
        outcome.up_bytes += num_new * self._rest_bytes
        for name in TIERS:
            outcome.tokens[name] += found[name]


def fleets(*, is_quick: bool) -> list[tuple[str, str, Fleet]]:
    """Return the simulated cases: title, device, fleet. Each varies one parameter."""
    usual = Fleet()
    sizes = (1, 3, 10, 100) if is_quick else (1, 3, 10, 100, 300, 1000)
    rows = [(f"{n} servers", "h200", replace(usual, replicas=n)) for n in sizes]
    for affinity, is_bounded in ((0.0, False), (0.5, False), (0.9, False), (1.0, False)):
        fleet = replace(usual, affinity=affinity, is_bounded=is_bounded)
        rows.append((f"affinity {fleet.routing}", "h200", fleet))
    varied = {
        **{f"memory_gb = {size}": replace(usual, memory_gb=size) for size in (10, 160)},
        "disk_gb = 0": replace(usual, disk_gb=0),
        **{f"kv_bits = {bits}": replace(usual, kv_bits=bits) for bits in (8, 4)},
    }
    rows += [(title, "h200", fleet) for title, fleet in varied.items()]
    apart = replace(usual, affinity=0.0, is_bounded=False)
    rows += [
        (f"no affinity, {gbit} Gbit/s, {bits} bits", "h200", fleet)
        for gbit, bits in ((10, 4), (100, 16))
        for fleet in [replace(apart, link_gbit=gbit, kv_bits=bits)]
    ]
    # What one server of this kind usually has.
    small = replace(usual, memory_gb=2, disk_gb=20, link_gbit=1)
    rows.append(("small servers, 1 Gbit/s", "arm", small))
    rows.append(("small, no affinity", "arm", replace(small, affinity=0.0, is_bounded=False)))
    return rows


def measure(report: Report) -> None:
    """Simulate all fleets."""
    turns = report.choose(8, 16)
    report.settings.update(turns=turns, head=HEAD, first=FIRST, more=MORE, seed=1)
    report.settings["devices"] = {name: device.title for name, device in DEVICES.items()}
    lines: list[str] = []
    for title, name, fleet in fleets(is_quick=report.is_quick):
        figures = Simulation(fleet, DEVICES[name], 1).run(turns).figures(fleet)
        if not lines:
            units = [f"{figure}, {unit}" for figure, (_, unit) in figures.items()]
            lines += [f"| {' | '.join(('fleet', *units))} |", "|---|" + "---:|" * len(units)]
        for figure, (value, unit) in figures.items():
            report.add(f"{title}: {figure}", value, unit)
        cells = [f"{value:.3g}" for value, _ in figures.values()]
        lines.append(f"| {' | '.join((title, *cells))} |")
    print("\n".join(lines), "\n")


if __name__ == "__main__":
    sys.exit(run("fleet", measure))
