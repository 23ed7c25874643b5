"""Cost of growth: starts and warm turns by number of agents on disk, turns by length.

Fills directories with 10, 1,000, 10,000 and 100,000 agents as a server leaves them (each with a
turn, its blocks' files and their rows), with the fake backend, whose own time is negligible.
Measures how long it takes to open the ledger and rebuild the index, until a server is ready, and
for a turn over HTTP: a later one, and the first after a restart; then an overview of the cache, a
page of the list of agents, and a garbage collection. With the most agents, a turn must take at most
1.5 times as long as with ten; an overview of 10,000 agents takes at most 0.2 s.

    python -m benchmarks.bench_growth --agents 100000 --blocks 10    # a million blocks, 15 GB
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.client import Client, Messages, continued, said
from benchmarks.common import serving
from benchmarks.report import Report, run, seconds
from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.backends.fake import FakeBackend, FakeTokenizer, fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.application.engine.model import LoadedModel
from semantic.application.settings import EngineLimits
from semantic.domain.agents import Agent, Pointer, Turn
from semantic.domain.blocks import BlockName, BlockPart, block_name, pack_tokens
from semantic.domain.chat import Message, Role
from semantic.domain.events import Usage
from semantic.domain.spec import LayerKind
from semantic.entrypoints.persistence import AgentMemory
from semantic.ports.backend import HostBuffer, KVPayload
from semantic.ports.storage import LedgerChange, PutAgent, PutPart, PutTurn

BLOCK, BATCH, NUM_TOKENS = 256, 1000, 200
NUM_TURNS, NUM_TALKERS = 8, 3
MAX_GROWTH = 1.5
MAX_OVERVIEW_S = {10_000: 0.2}
NUM_REPORTS = 5
TEXT = "All work and no play makes an agent dull. "


def open_memory(home: Path) -> tuple[AgentMemory, LoadedModel]:
    """Open a cache directory with the model, as a server with the fake backend does."""
    memory = AgentMemory(load_settings({"home": str(home), "backend": "fake"}))
    backend = FakeBackend(fake_spec(block_tokens=BLOCK))
    model = LoadedModel("fake", backend, FakeTokenizer(), "fake", memory.codec.kv_format)
    return memory, model


def make_agent(
    root: BlockName, abi: str, index: int, num_blocks: int
) -> tuple[Agent, Turn, list[tuple[BlockPart, KVPayload]]]:
    """Create an agent with one turn of so many blocks, the last of them not full."""
    num_tokens = BLOCK * (num_blocks - 1) + NUM_TOKENS
    said_tokens = f"agent {index} ".encode() + TEXT.encode() * (num_tokens // len(TEXT) + 1)
    tokens, parts, chain = list(said_tokens[:num_tokens]), [], root
    for start in range(0, len(tokens), BLOCK):
        own = tokens[start : start + BLOCK]
        name = block_name(chain, own)
        part = BlockPart(root, name, chain, LayerKind.FULL, start, pack_tokens(own))
        ids = HostBuffer("full", (len(own),), "u32", bytes(4 * len(own)))
        payload = KVPayload(abi, LayerKind.FULL, start, start + len(own), (ids,))
        parts.append((part, payload))
        chain = name
    turn = Turn(
        id=f"turn_{index:08}",
        parent=None,
        agent_id=f"agent-{index}",
        messages=(Message.of(Role.USER, TEXT), Message.of(Role.ASSISTANT, TEXT)),
        tokens=tuple(tokens),
        num_tokens=len(tokens),
        pointer=Pointer(root, chain, len(tokens)),
        usage=Usage(len(tokens), 40),
        created_at=time.time(),
    )
    agent = Agent(turn.agent_id, created_at=time.time(), head=turn.id, num_turns=1)
    return agent, turn, parts


def fill(home: Path, num_agents: int, num_blocks: int = 1) -> None:
    """Add agents with so many blocks each to a directory."""
    memory, model = open_memory(home)
    principal = memory.agents.principal()
    root, abi = model.root(principal), model.backend.traits.kv_abi
    files = SafetensorsCache(home / "cache", memory.codec)
    for first in range(0, num_agents, BATCH):
        changes: list[LedgerChange] = []
        for index in range(first, min(first + BATCH, num_agents)):
            agent, turn, parts = make_agent(root, abi, index, num_blocks)
            changes += [PutTurn(principal.tenant, turn), PutAgent(agent)]
            for part, payload in parts:
                changes.append(PutPart(files.write(part, payload, is_synced=False)))
        memory.ledger.apply(changes, is_synced=False)
    memory.close(600)


def opening(home: Path) -> tuple[float, float]:
    """Return the seconds to open the ledger and rebuild the index, and the CPU time of that."""
    started, cpu = time.perf_counter(), time.process_time()
    memory, model = open_memory(home)
    memory.make_engine(model, EngineLimits(), lambda _: None, lambda: None)
    took = time.perf_counter() - started, time.process_time() - cpu
    memory.close(600)
    return took


async def turns(client: Client, talks: list[Messages], num_turns: int) -> list[float]:
    """Return the milliseconds to the first token of further turns, one after another."""
    times: list[float] = []
    for turn in range(num_turns):
        for place, messages in enumerate(talks):
            reply = await client.ask(messages, 4)
            times.append(1000 * reply.first)
            talks[place] = continued(messages, reply, f"And then, {turn}?")
    return times


def measure_reports(report: Report, title: str, port: int, most: float | None) -> None:
    """Measure what an operator asks for: an overview, a page of agents, a garbage collection."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=600) as http:

        def ask(method: str, path: str) -> float:
            return seconds(lambda: http.request(method, path).raise_for_status())

        # The first is computed; the next ones may repeat what took long.
        report.add(f"{title}: first overview of the cache", ask("GET", "/v1/cache"), "s", most=most)
        times = [ask("GET", "/v1/cache") for _ in range(NUM_REPORTS)]
        report.add(f"{title}: later overview", times, "s")
        times = [ask("GET", "/v1/agents?limit=100") for _ in range(NUM_REPORTS)]
        report.add(f"{title}: a page of 100 agents", times, "s")
        report.add(f"{title}: garbage collection", ask("POST", "/v1/cache/gc"), "s")


def measure_agents(report: Report, home: Path, num_agents: int) -> None:
    """Measure a directory with this many agents: open, serve, send turns, serve again."""
    title, num_blocks = f"{num_agents:,} agents", report.options.blocks
    if not home.exists():
        fill_s = seconds(lambda: fill(home, num_agents, num_blocks))
        report.note(f"{title} created in {fill_s:.0f} s")
    opened, cpu = zip(*(opening(home) for _ in range(2)), strict=True)
    report.add(f"{title}: ledger opens and index is rebuilt", opened, "s")
    report.add(f"{title}: CPU time of that", cpu, "s")
    talks = [said(f"{i}: {TEXT * 30}") for i in range(NUM_TALKERS)]
    starts = []
    for name in ("later turn", "first turn after a restart"):
        started = time.perf_counter()
        with serving("--backend", "fake", "--home", str(home)) as port:
            starts.append(time.perf_counter() - started)
            client = Client(f"http://127.0.0.1:{port}/v1", more={})
            asyncio.run(turns(client, [said("Good morning.")], 3))
            if name == "later turn":
                asyncio.run(turns(client, talks, 1))
                report.add(f"{title}: {name}", asyncio.run(turns(client, talks, NUM_TURNS)), "ms")
            else:
                report.add(f"{title}: {name}", asyncio.run(turns(client, talks, 1)), "ms")
                measure_reports(report, title, port, MAX_OVERVIEW_S.get(num_agents))
    report.add(f"{title}: server is ready", starts, "s")


def measure_lengths(report: Report, home: Path, lengths: list[int]) -> None:
    """Measure later turns of conversations of these lengths (in tokens, which are bytes here)."""
    with serving("--backend", "fake", "--home", str(home)) as port:
        client = Client(f"http://127.0.0.1:{port}/v1", more={})
        for length in lengths:
            talks = [said(f"{length}: " + TEXT * (length // len(TEXT)))]
            asyncio.run(turns(client, talks, 1))
            times = asyncio.run(turns(client, talks, NUM_TURNS))
            report.add(f"{length:,} tokens: later turn", times, "ms")


def measure(report: Report) -> None:
    """Measure by number of agents, then by length of a conversation."""
    counts = report.options.agents or report.choose([10, 1000], [10, 1000, 10_000, 100_000])
    num_blocks = report.options.blocks
    report.settings.update(agents=counts, blocks=num_blocks, talkers=NUM_TALKERS, turns=NUM_TURNS)
    with tempfile.TemporaryDirectory() as directory:
        homes = report.options.directory or Path(directory)
        for count in counts:
            measure_agents(report, homes / str(count), count)
        lengths = report.choose([1000, 10_000], [1000, 10_000, 100_000])
        measure_lengths(report, Path(directory) / "lengths", lengths)
    figures = report.figures
    few, many = counts[0], counts[-1]
    for name in ("later turn", "first turn after a restart"):
        ratio = (
            figures[f"{many:,} agents: {name}"].median / figures[f"{few:,} agents: {name}"].median
        )
        report.add(f"{name}, {many:,} agents / {few:,}", ratio, most=MAX_GROWTH)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--agents", type=int, nargs="+", help="numbers of agents on disk")
    parser.add_argument("--blocks", type=int, default=1, help="blocks of each agent")
    parser.add_argument("--directory", type=Path, help="keep the agents here for later runs")


if __name__ == "__main__":
    sys.exit(run("growth", measure, add_options=add_options))
