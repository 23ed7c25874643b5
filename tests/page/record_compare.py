"""Records the README's picture of the view Compare: `make page-picture`.

A server with the starter model writes two branches of a conversation, and Chromium shows how they
are chosen in the graph, compared, and how one is kept. Screenshots become an animated PNG of 20
seconds, which a browser shows like any other picture.
"""

import base64
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from PIL import Image

from semantic.adapters.config.settings import STARTER_MODEL
from tests.http_server import make_settings, run_server
from tests.page.browser import Browser, Page, find_chromium

_SIZE = (1080, 680)
_SECONDS = 20.0
_MAX_BYTES = 500_000
_SYSTEM = "You are a travel writer. Answer in short sentences."
_COMMON = ("What is Lisbon known for?", "Which season is best for a visit?")
_BRANCHES = {
    "lisbon": "Write a short packing list for a week in Lisbon in summer.",
    "lisbon-winter": "Write a short packing list for a week in Lisbon in winter.",
}
# A pointer and a line of text above the page. The page's policy allows styles set by scripts.
_OVERLAY = """(() => {
  const over = { position: "fixed", zIndex: 99, pointerEvents: "none" };
  const add = (kind, style) => {
    const made = document.body.appendChild(document.createElement(kind));
    Object.assign(made.style, over, style);
  };
  add("figure", {
    left: "50%", bottom: "18px", transform: "translateX(-50%)", margin: 0, padding: "8px 18px",
    background: "#1c1d1f", color: "#fff", borderRadius: "22px", font: "600 16px system-ui",
    whiteSpace: "nowrap",
  });
  add("aside", {
    left: "0", top: "0", width: "20px", height: "20px", borderRadius: "50%", display: "none",
    background: "#e8590c66", border: "2px solid #e8590c", transform: "translate(-50%, -50%)",
  });
})()"""


@dataclass
class Recording:
    """Screenshots of a page, each with the seconds that it stays."""

    page: Page
    frames: list[tuple[Image.Image, float]] = field(default_factory=list)

    def show(self, seconds: float, caption: str | None = None) -> None:
        if caption is not None:
            self.page.look(
                f"document.querySelector('body > figure').textContent = {json.dumps(caption)}"
            )
        shot = self.page.call("Page.captureScreenshot", format="png")["data"]
        image = Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")
        self.frames.append((image, seconds))

    def point(self, kind: str, text: str = "") -> None:
        """Move the pointer to an element, and show it there before it is clicked."""
        x, y = self.page.place(kind, text)
        self.page.look(
            "Object.assign(document.querySelector('body > aside').style, "
            f"{{left: '{x}px', top: '{y}px', display: 'block'}})"
        )
        self.show(0.7)

    def click(self, kind: str, text: str = "") -> None:
        self.point(kind, text)
        self.page.click(kind, text)

    def save(self, path: Path) -> int:
        """Write the frames with one palette; the last one lasts until 20 seconds are over."""
        images, seconds = [image for image, _ in self.frames], [s for _, s in self.frames]
        seconds[-1] += max(0.0, _SECONDS - sum(seconds))
        tall = Image.new("RGB", (images[0].width, images[0].height * len(images)))
        for index, image in enumerate(images):
            tall.paste(image, (0, index * image.height))
        palette = tall.quantize(160, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        plain = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
        plain[0].save(
            path,
            save_all=True,
            append_images=plain[1:],
            duration=[round(1000 * one) for one in seconds],
            loop=0,
            optimize=True,
        )
        return path.stat().st_size


def write_branches(http: httpx.Client) -> None:
    """Make a conversation and a fork of it, and let the model answer both."""

    def say(agent: str, text: str) -> None:
        options = {"temperature": 0, "repetition_penalty": 1.05, "max_tokens": 110}
        path = f"/v1/agents/{agent}/generate"
        http.post(path, json={"message": text, **options}).raise_for_status()

    first, second = _BRANCHES
    for name in ("translator", "reviewer"):
        http.post("/v1/agents", json={"id": name}).raise_for_status()
        say(name, "Say hello.")
    http.post("/v1/agents", json={"id": first, "system": _SYSTEM}).raise_for_status()
    for text in _COMMON:
        say(first, text)
    http.post(f"/v1/agents/{first}/fork", json={"ids": [second]}).raise_for_status()
    for name, text in _BRANCHES.items():
        say(name, text)


def record(page: Page) -> Recording:
    """Choose the two branches, compare them, and keep one."""
    made = Recording(page)
    page.look(_OVERLAY)
    page.await_true("document.querySelectorAll('.rows .row').length === 4")
    made.show(2.0, "Every conversation is a branch, as in git")
    made.click(".rows .row", "lisbon")
    page.await_text("lisbon", ".detail h2")
    made.show(1.2, "Choose two branches")
    made.click(".deeds button", "Compare")
    page.await_text("choose another line", ".choosing")
    made.click(".rows .row", "lisbon-winter")
    page.await_true("CSS.highlights.get('first').size > 0")
    made.show(3.4, "What they share is computed once")
    page.press("j")
    made.show(4.4, "Words that differ are marked")
    page.look("document.querySelector('.pair footer').scrollIntoView({ block: 'center' })")
    made.show(3.0, "with the tokens and seconds of each branch")
    made.click(".branch-head.second button", "Keep this one")
    page.await_text("Keep", "dialog h2")
    made.show(1.0, "Keep the better one")
    made.click("dialog button", "Keep")
    page.await_true("!!document.querySelector('section.chat .exchange')")
    made.show(1.5, "and go on from there")
    return made


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a Chromium with an empty profile."""
    executable = find_chromium()
    if executable is None:
        sys.exit("no Chromium: apt-get install chromium, or set CHROMIUM")
    with tempfile.TemporaryDirectory() as profile:
        made = Browser(executable, Path(profile))
        try:
            yield made
        finally:
            made.close()


def main() -> None:
    """Write the picture to the path that is given."""
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as home, open_browser() as browser:
        settings = make_settings(
            Path(home), backend="torch", model=STARTER_MODEL, log_level="error"
        )
        with run_server(settings) as running:
            with running.client() as http:
                write_branches(http)
            page = browser.open(f"{running.url}/#/agents", *_SIZE)
            made = record(page)
    size = made.save(target)
    sys.stdout.write(f"{target}: {len(made.frames)} frames, {size:,} bytes\n")
    if size > _MAX_BYTES:
        sys.exit(f"more than {_MAX_BYTES:,} bytes; record fewer or smaller frames")


if __name__ == "__main__":
    main()
