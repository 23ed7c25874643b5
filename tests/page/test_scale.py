"""The page with 1,000 agents and 50,000 blocks: all of it is shown, little of it is drawn.

Prints how long the page takes; `make page-tests ARGS="-s -k scale"` shows that.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.domain.agents import LOCAL_TENANT, Agent, Pointer, Turn
from semantic.domain.blocks import BlockName
from semantic.domain.events import Usage
from semantic.domain.spec import DEFAULT_BLOCK_TOKENS, LayerKind
from semantic.entrypoints.bootstrap import Server
from tests.http_server import RunningServer, make_settings, run_server
from tests.page.browser import NEEDED, Browser, Page
from tests.unit.application.memory_rig import make_payload

pytestmark = NEEDED

NUM_AGENTS = 1_000
NUM_SHARED, NUM_OWN = 50, 50  # blocks of a system prompt that ten agents share, and of each
FRAMES = """new Promise((resolve) => {
  const times = [];
  let before = performance.now();
  const frame = (now) => {
    times.push(now - before);
    before = now;
    if (times.length < 60) requestAnimationFrame(frame);
    else resolve(times.slice(1).sort((a, b) => a - b));
  };
  requestAnimationFrame(frame);
})"""


def seal_chain(server: Server, parent: BlockName, first: int, count: int) -> BlockName:
    """Seal blocks that no other chain has."""
    store, spec = server.memory.cache.store, fake_spec(block_tokens=DEFAULT_BLOCK_TOKENS)
    root = root_of(server)
    payload = make_payload(
        spec, [0] * DEFAULT_BLOCK_TOKENS, 0, DEFAULT_BLOCK_TOKENS, LayerKind.FULL
    )
    known = store.get(parent)
    start = known.end if known else 0
    for index in range(count):
        tokens = [first, index] * (DEFAULT_BLOCK_TOKENS // 2)
        place = start + index * DEFAULT_BLOCK_TOKENS
        own = replace(payload, start=place, end=place + DEFAULT_BLOCK_TOKENS)
        sealed = store.seal(root, parent, tokens, [own])
        assert sealed is not None
        parent = sealed
    return parent


def root_of(server: Server) -> BlockName:
    assert server.device.model is not None
    return server.device.model.root(server.memory.agents.principal(LOCAL_TENANT))


def populate(
    server: Server, num_agents: int = NUM_AGENTS, num_shared: int = NUM_SHARED // 10
) -> None:
    """Make agents in groups of ten, each with a turn and a chain of blocks."""
    root = root_of(server)
    num_tokens = (num_shared + NUM_OWN) * DEFAULT_BLOCK_TOKENS
    for group in range(num_agents // 10):
        shared = seal_chain(server, root, group + 1_000_000, num_shared)
        first = Turn(f"turn_{group}", None, "", (), (), 1, None, Usage(1), 1.0)
        for member in range(10):
            number = group * 10 + member
            block = seal_chain(server, shared, number, NUM_OWN)
            pointer = Pointer(root, block, num_tokens)
            own = Turn(f"turn_{group}_{member}", first.id, "", (), (), 1, pointer, Usage(1), 2.0)
            agent = Agent(f"agent-{number:04}", float(number), last_used=2e9 + number)
            server.memory.agents.create(
                agent.advance(first.id, at=1.0).advance(own.id, at=2e9 + number), [first, own]
            )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = make_settings(tmp_path_factory.mktemp("home"), durability="none", log_level="error")
    with run_server(settings) as server:
        populate(server.server)
        yield server


def tell(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{text}\n")


def frames(page: Page) -> str:
    times = page.look(FRAMES)
    return f"frame p50 {times[len(times) // 2]:.1f} ms, p95 {times[int(len(times) * 0.95)]:.1f} ms"


def paint(page: Page) -> float:
    entries = "performance.getEntriesByName('first-contentful-paint')"
    return float(page.await_true(f"{entries}[0]?.startTime"))


def test_a_thousand_agents_are_listed(
    running: RunningServer, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    page = browser.open(f"{running.url}/#/agents")
    page.await_true(f"document.querySelector('.chips b').innerText === '{NUM_AGENTS:,}'")
    listed = page.look("performance.now()")
    page.await_true("document.querySelectorAll('.rows .row').length > 10")
    assert page.look("document.querySelectorAll('.rows .row').length") < 80
    page.look("document.querySelector('.rows').scrollTop = 1e6")
    page.await_text("agent-0000", ".rows .row")
    page.look("setInterval(() => document.querySelector('.rows').scrollBy(0, -38), 10)")
    tell(capsys, f"1,000 agents: first paint {paint(page):.0f} ms, all listed {listed:.0f} ms")
    tell(capsys, f"scrolling: {frames(page)}")


def test_fifty_thousand_blocks_are_mapped(
    running: RunningServer, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    page = browser.open(f"{running.url}/#/memory")
    count = "parseInt(document.querySelector('.map canvas').getAttribute('aria-label'))"
    before = page.await_true(f"{count} >= 50000 && {count}")
    mapped = page.look("performance.now()")
    box = "document.querySelector('.map canvas').getBoundingClientRect()"
    page.await_text("RAM", ".budgets")  # it moves the map
    page.hover(page.look(f"{box}.left") + 3, page.look(f"{box}.top") + 3)
    page.await_true("!!document.querySelector('.tip')")
    quiet = frames(page)
    seal_chain(running.server, root_of(running.server), 5_000_000, 500)
    page.await_true(f"{count} === {before + 500}")
    tell(capsys, f"{before:,} blocks: first paint {paint(page):.0f} ms, mapped {mapped:.0f} ms")
    tell(capsys, f"at rest: {quiet}; while 500 flash: {frames(page)}")
