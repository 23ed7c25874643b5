"""A real Chromium, driven over its DevTools pipe: what a person would click, type and see.

No package is needed beside the browser. `$CHROMIUM` names it, or it is found by its usual names.
"""

import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--mute-audio",
    "--disable-background-networking",
    "--disable-extensions",
    "--disable-dev-shm-usage",
)
_PATIENCE_S = 90.0
# The browser reads commands from descriptor 3, and writes events to 4.
_START = """import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(reads, 3), os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])"""
# Finds the first element of a kind that is seen and has a text; empty text takes any.
_FIND = """(kind, text) => [...document.querySelectorAll(kind)].find((found) =>
  found.getClientRects().length && (found.innerText || found.value || "").includes(text))"""

# Texts that are seen, and their contrast with what is behind them if that is less than 4.5.
FAINT = """(() => {
  const paper = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const numbers = (colour) => {
    paper.clearRect(0, 0, 1, 1);
    paper.fillStyle = colour;
    paper.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paper.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const mix = ([r, g, b, a], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
  const behind = (element) => element
    ? mix(numbers(getComputedStyle(element).backgroundColor), behind(element.parentElement))
    : [255, 255, 255];
  const light = (colour) => colour
    .map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const opacity = (element) => element
    ? getComputedStyle(element).opacity * opacity(element.parentElement) : 1;
  const faint = [];
  const check = (element, text, style) => {
    const shown = opacity(element);
    const box = element.getBoundingClientRect();
    if (!element.checkVisibility({ visibilityProperty: true }) || box.width < 2 || !shown) return;
    if (element.closest(":disabled, .hidden")) return;
    const ground = behind(element);
    const [r, g, b, a] = numbers(style.color);
    const lights = [light(mix([r, g, b, a * shown], ground)), light(ground)].sort((x, y) => y - x);
    const ratio = (lights[0] + 0.05) / (lights[1] + 0.05);
    const where = `${element.tagName}.${element.className}`;
    if (ratio < 4.5) faint.push(`${ratio.toFixed(2)} ${where}: ${text.slice(0, 40)}`);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim();
    const element = texts.currentNode.parentElement;
    if (text && !element.closest("noscript")) check(element, text, getComputedStyle(element));
  }
  for (const element of document.querySelectorAll("[placeholder]")) {
    const style = getComputedStyle(element, "::placeholder");
    if (!element.value) check(element, element.placeholder, style);
  }
  return faint;
})()"""


def find_chromium() -> str | None:
    """Where the browser is; None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """The process, and the messages that go to it and come from it."""

    def __init__(self, executable: str, profile: Path) -> None:
        command_out, command_in = os.pipe()
        event_out, event_in = os.pipe()
        arguments = [executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(  # noqa: S603 - the browser we were told of
            [sys.executable, "-c", _START, str(command_out), str(event_in), *arguments],
            pass_fds=(command_out, event_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_out)
        os.close(event_in)
        self._commands: IO[bytes] = os.fdopen(command_in, "wb", buffering=0)
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._contexts: list[str] = []
        self.console: list[str] = []
        threading.Thread(target=self._read, args=(os.fdopen(event_out, "rb"),), daemon=True).start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask the browser for something, and wait for its answer."""
        number = next(self._ids)
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._commands.write(json.dumps(message).encode() + b"\0")
        told = answer.get(timeout=_PATIENCE_S)
        assert "error" not in told, (method, told["error"])
        result: dict[str, Any] = told["result"]
        return result

    def _read(self, events: IO[bytes]) -> None:
        rest = b""
        while piece := os.read(events.fileno(), 2**16):
            *messages, rest = (rest + piece).split(b"\0")
            for message in messages:
                self._take(json.loads(message))
        events.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.pop(message["id"]).put(message)
        elif message["method"] == "Runtime.exceptionThrown":
            detail = message["params"]["exceptionDetails"]
            self.console.append(detail.get("exception", {}).get("description", detail["text"]))
        elif (
            message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error"
        ):
            self.console.append(message["params"]["entry"]["text"])

    def open(self, url: str, width: int = 1280, height: int = 820) -> "Page":
        """Open a page in a tab of its own, with nothing kept from others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        made = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        target = made["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        page.resize(width, height)
        self._contexts.append(context)
        page.go(url)
        page.await_true("!!document.querySelector('.rail')")
        return page

    def close_pages(self) -> None:
        """Close all tabs."""
        while self._contexts:
            self.call("Target.disposeBrowserContext", browserContextId=self._contexts.pop())

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError, queue.Empty, AssertionError):
            self.call("Browser.close")
        self._commands.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Page:
    """One tab. What it waits for has to come within half a minute."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the tab for something."""
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        """Give it a size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def look(self, expression: str) -> Any:
        """What an expression is in the page."""
        told = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def await_true(self, expression: str) -> Any:
        """Wait until an expression is true, and return what it is."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):  # the page may be on its way
                if found := self.look(expression):
                    return found
            time.sleep(0.05)
        shown = self.look("document.body.innerText")
        raise AssertionError(f"never true: {expression}\n{shown}\n{self._browser.console}")

    def await_text(self, text: str, kind: str = "body") -> None:
        """Wait until a text is seen."""
        self.await_true(f"!!({_FIND})({json.dumps(kind)}, {json.dumps(text)})")

    def place(self, kind: str, text: str = "") -> tuple[float, float]:
        """Wait for an element until nothing moves it, and say where its middle is."""
        found = f"({_FIND})({json.dumps(kind)}, {json.dumps(text)})"
        measured = (
            f"(() => {{ const found = {found}; found?.scrollIntoView({{block: 'nearest'}}); "
            "const box = found?.getBoundingClientRect(); "
            "return box && [box.left + box.width / 2, box.top + box.height / 2] })()"
        )
        deadline = time.monotonic() + _PATIENCE_S
        before, box = None, self.await_true(measured)
        while box != before and time.monotonic() < deadline:
            time.sleep(0.05)
            before, box = box, self.await_true(measured)
        return box[0], box[1]

    def click(self, kind: str, text: str = "") -> None:
        """Click on an element."""
        x, y = self.place(kind, text)
        for what in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=what, x=x, y=y, button="left", clickCount=1)

    def hover(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str, kind: str | None = None) -> None:
        """Type a text, into an element if one is named."""
        if kind is not None:
            self.click(kind)
            self.look("document.activeElement.select?.()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "Delete": 46}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = codes.get(key, ord(key.upper()) if len(key) == 1 else 0)
        for what in ("keyDown", "keyUp"):
            params = {"type": what, "key": key, "windowsVirtualKeyCode": code}
            self.call(
                "Input.dispatchKeyEvent", **params, **({"text": text} if what == "keyDown" else {})
            )


NEEDED = [
    pytest.mark.page,
    pytest.mark.skipif("PAGE_TESTS" not in os.environ, reason="run by make page-tests"),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium: apt-get install chromium"),
]
