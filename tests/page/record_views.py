"""Records the pictures of the views Memory and Now and of a timeline: `make page-pictures`.

Memory and the timeline come from the fake backend, whose blocks are small; Now comes from the
starter model, which answers three agents for two minutes.
"""

import base64
import io
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from PIL import Image

from semantic.adapters.config.settings import STARTER_MODEL
from tests.http_server import RunningServer, make_settings, run_server
from tests.page.browser import Browser, Page
from tests.page.record_compare import open_browser
from tests.page.test_scale import populate

_SIZE = (1280, 800)
_RECORDING = Path(__file__).parents[1] / "recordings" / "pi.json"
_TALK_S = 120.0
_QUESTIONS = ("What is a hash table?", "Give an example.", "And when is a tree better?")


def save(page: Page, path: Path, kind: str = "body", height: float = _SIZE[1]) -> None:
    """Write a picture of an element, or of its upper part."""
    left, top, width = page.look(
        f"(() => {{ const box = document.querySelector({json.dumps(kind)}).getBoundingClientRect();"
        " return [box.left, box.top, box.width] })()"
    )
    clip = {"x": left, "y": top, "width": width, "height": height, "scale": 1}
    shot = page.call("Page.captureScreenshot", format="png", clip=clip)["data"]
    image = Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")
    image.save(path, optimize=True)


def record_memory(browser: Browser, running: RunningServer, path: Path) -> None:
    """Ninety agents that share nine system prompts; the KV cache of thirty is on disk only."""
    populate(running.server, num_agents=90, num_shared=26)
    with running.client() as http:
        for number in range(0, 90, 3):
            http.post(f"/v1/agents/agent-{number:04}/evict").raise_for_status()
    page = browser.open(f"{running.url}/#/memory", *_SIZE)
    canvas = "document.querySelector('.map canvas')"
    page.await_text("empty", ".budgets")  # the queue of blocks to write
    page.await_true("document.querySelectorAll('.legend b')[3].innerText === '234'")  # shared ones
    page.await_true(f"parseInt({canvas}.getAttribute('aria-label')) >= 90 * 50 + 9 * 26")
    left, top = (page.look(f"{canvas}.getBoundingClientRect().{side}") for side in ("left", "top"))
    page.hover(left + 110, top + 60)
    page.await_true("!!document.querySelector('.tip .owners')")
    time.sleep(2)  # cells that flash come to rest
    save(page, path)


def record_timeline(
    browser: Browser, running: RunningServer, http: httpx.Client, path: Path
) -> None:
    """A client's conversation: its tools change, then its system prompt, then its KV cache goes."""
    first, *_, last = json.loads(_RECORDING.read_text())["requests"]
    messages, tools = list(first["messages"][:2]), first["tools"]

    def say(number: int) -> None:
        body = {"messages": messages, "tools": tools, "max_tokens": 40}
        sent = http.post("/v1/chat/completions", json=body, headers={"x-agent-id": "pi"})
        reply = sent.raise_for_status().json()["choices"][0]["message"]
        text = f"And now step {number}, with some more detail. " * 12
        messages.extend((reply, {"role": "user", "content": text}))

    for number in range(12):
        if number == 5:
            tools = last["tools"]
        if number == 8:
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\nBe brief."}
        if number == 11:
            http.post("/v1/agents/pi/evict", json={"to": "cold"}).raise_for_status()
        say(number)
    page = browser.open(f"{running.url}/#/agents/pi", *_SIZE)
    page.await_text("evicted", ".timeline .miss")
    page.await_true("document.querySelectorAll('.log .turn').length > 1")
    save(page, path, ".detail")


def record_now(browser: Browser, running: RunningServer, path: Path) -> None:
    """Three agents that talk for two minutes, and are still talking."""
    page = browser.open(f"{running.url}/#/now", *_SIZE)
    deadline = time.monotonic() + _TALK_S

    def talk(name: str) -> None:
        with running.client() as http:
            http.post("/v1/agents", json={"id": name}).raise_for_status()
            while time.monotonic() < deadline:
                for text in _QUESTIONS:
                    body = {"message": text, "max_tokens": 60}
                    http.post(f"/v1/agents/{name}/generate", json=body).raise_for_status()
                time.sleep(2)
                http.post(f"/v1/agents/{name}/rewind", json={"turns": 1}).raise_for_status()

    talkers = [threading.Thread(target=talk, args=(n,)) for n in ("coder", "reviewer", "writer")]
    for talker in talkers:
        talker.start()
    while time.monotonic() < deadline - 5:
        time.sleep(1)
    page.await_true("document.querySelectorAll('.chart canvas').length === 5")
    save(page, path)
    for talker in talkers:
        talker.join()


def main() -> None:
    """Write the pictures into the directory that is given."""
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as home, open_browser() as browser:
        small = make_settings(Path(home) / "a", memory_budget_mb=16, log_level="error")
        with run_server(small) as running:
            record_memory(browser, running, target / "page-memory.png")
        other = make_settings(Path(home) / "b", log_level="error")
        with run_server(other) as running, running.client() as http:
            record_timeline(browser, running, http, target / "page-timeline.png")
        starter = make_settings(
            Path(home) / "c", backend="torch", model=STARTER_MODEL, log_level="error"
        )
        with run_server(starter) as running:
            record_now(browser, running, target / "page-now.png")


if __name__ == "__main__":
    main()
