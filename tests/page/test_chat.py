"""The chat in a real Chromium: replies as Markdown, stop and edit, options, keyboard, contrast."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.domain.agents import Agent, Turn
from semantic.domain.chat import (
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from semantic.domain.events import ReplyTiming, Usage
from semantic.domain.sampling import FinishReason
from tests.http_server import RunningServer
from tests.integration.test_direct_api import get, make, say
from tests.page.browser import FAINT, NEEDED, Browser, Page
from tests.smoke.server_process import serve
from tests.unit.application.device_rig import hold
from tests.waiting import await_that

pytestmark = [*NEEDED, pytest.mark.usefixtures("no_errors")]

LONG = "You help with a web shop. Be brief, cite files, never invent functions. " * 12
BOX = ".composer textarea"
TEXT = f"document.querySelector('{BOX}').value"
MARKDOWN = """\
# Steps

Use *this* and **that**, see [the manual](https://example.org/manual) or
[run](javascript:document.title='bad') it. The area is $\\pi r_1^2$, and \\(a_1 + b_2\\).

<script>document.title = 'bad'</script>
<img src=x onerror="document.title='bad'"> ![a cat](https://example.org/cat.png)

> A quotation.

1. first
   - nested
   ```python
   def area(r):  # of a circle
       return 3.14 * r ** 2
   ```
2. second

| name | price |
|---|--:|
| tea | 4 |

$$
\\sum_i x_i
$$

- [x] done

```
plain <b>text</b>
```
"""


def keep_turns(running: RunningServer, agent_id: str, *turns: tuple[Message, ...]) -> None:
    """Store an agent with these turns, as a client of the API would have left them."""
    agent = Agent(agent_id, 1.0)
    kept: list[Turn] = []
    for number, messages in enumerate(turns, 1):
        usage = Usage(20, 8, accepted_prediction_tokens=5, rejected_prediction_tokens=2)
        turn = Turn(
            id=f"turn_{agent_id}_{number}",
            parent=kept[-1].id if kept else None,
            agent_id=agent_id,
            messages=messages,
            tokens=(),
            num_tokens=28 * number,
            pointer=None,
            usage=usage,
            created_at=1.0,
            reason=FinishReason.END_TURN,
            timing=ReplyTiming(0.21, 0.25),
        )
        agent = agent.advance(turn.id, at=1.0)
        kept.append(turn)
    running.server.memory.agents.create(agent, kept)


def exchange(asked: str, *parts: Any) -> tuple[Message, ...]:
    return Message.of(Role.USER, asked), Message(Role.ASSISTANT, parts)


def texts(page: Page, kind: str) -> Any:
    return page.look(f"[...document.querySelectorAll({kind!r})].map((found) => found.innerText)")


def send(page: Page, text: str) -> None:
    page.type(text, BOX)
    page.press("Enter")


def open_menu(page: Page, menu: str, item: str) -> None:
    page.click(f"{menu} .menu summary")
    page.click(f"{menu} .sheet button", item)


# -- a first visit ------------------------------------------------------------------------------


def test_a_first_message_makes_an_agent(page: Page, http: httpx.Client) -> None:
    page.await_text("Write a message below to start", ".welcome")
    page.await_true(f"document.activeElement === document.querySelector('{BOX}')")
    page.click(".chat-head button", "Add a system prompt")
    page.type(LONG, "dialog textarea")
    page.click("dialog button", "Save")
    page.await_text("You help with a web shop", ".chat-head .pick")
    send(page, "Où est le prix?")
    page.await_text("ou-est-le-prix", ".conversation h1")
    page.await_text("of the prompt reused", ".exchange:not(.live) .cost")
    agent = get(http, "/v1/agents/ou-est-le-prix")
    assert agent["settings"]["system"] == LONG.strip()

    page.resize(1280, 420)
    send(page, "And the tax?")
    page.await_true("document.querySelectorAll('.exchange:not(.live)').length === 2")
    turns = get(http, "/v1/agents/ou-est-le-prix/turns")["data"]
    assert page.look(TEXT) == ""  # what was sent does not come back
    talk = "document.querySelector('.talk')"  # it follows a reply that grows
    page.await_true(f"{talk}.scrollHeight - {talk}.scrollTop - {talk}.clientHeight < 80")
    page.resize(1280, 820)
    asked = [turn["messages"][-2]["content"][0]["text"] for turn in turns]
    assert asked == ["And the tax?", "Où est le prix?"]
    # Sampled text may hold control characters and Markdown, which a browser does not show.
    told = [turn["messages"][-1]["content"][0]["text"] for turn in reversed(turns)]
    assert [re.findall("[a-z]{3}", text)[:1] for text in texts(page, ".said.assistant .prose")] == [
        re.findall("[a-z]{3}", text)[:1] for text in told
    ]
    open_menu(page, ".exchange:last-of-type", "What was reused")
    page.await_text(f"{turns[0]['reuse']['hot']:,} still open", ".why .key")
    page.await_text("begins with the complete stored conversation", ".why")


def test_an_example_starts_a_chat(page: Page, http: httpx.Client) -> None:
    page.click(".ideas button", "Compare SQLite")
    page.await_text("of the prompt reused", ".exchange:not(.live) .cost")
    assert [agent["id"] for agent in get(http, "/v1/agents")["data"]] == [
        "compare-sqlite-and-postgresql-in"
    ]
    page.click(".people button", "New chat")
    page.await_text("Write a message below to start", ".welcome")


def test_options_are_sent_and_the_model_is_chosen(page: Page, http: httpx.Client) -> None:
    page.look(
        "window.sent = []; const real = fetch; window.fetch = (path, options) => "
        "(options?.body && sent.push(options.body), real(path, options))"
    )
    page.click(".under .menu summary")
    page.type("0.5", ".sheet input[name=top_p]")
    page.type("5", ".sheet input[name=max_tokens]")
    page.press("Escape")
    page.await_text("Options (2)", ".under summary")
    send(page, "hello")
    page.await_text("reached its limit of tokens", ".exchange:not(.live) .cost")
    assert json.loads(page.look("sent.at(-1)"))["top_p"] == 0.5
    assert get(http, "/v1/agents/hello/turns")["data"][0]["usage"]["completion_tokens"] == 5

    choose = (
        "(() => { const menu = document.querySelector('select.pick'); menu.value = 'fake-2'; "
        "menu.dispatchEvent(new Event('change', { bubbles: true })) })()"
    )
    assert page.look("document.querySelector('select.pick').value") == "fake"
    page.look(choose)
    await_that(lambda: http.get("/health").json()["model"] == "fake-2")
    page.await_true("document.querySelector('select.pick').value === 'fake-2'")


# -- replies ------------------------------------------------------------------------------------


def test_markdown_is_complete_and_sanitised(running: RunningServer, browser: Browser) -> None:
    keep_turns(running, "writer", exchange("How?", TextPart(MARKDOWN)))
    page = browser.open(f"{running.url}/#/chat/writer")
    page.await_text("Steps", ".prose h1")
    for kind in ("em", "strong", "blockquote p", "ol > li > ul", "td[align=right]", "hr ~ p, pre"):
        assert page.look(f"!!document.querySelector('.prose {kind}')"), kind
    assert page.look("document.querySelectorAll('.prose li .code .hljs-keyword').length") == 2
    assert texts(page, ".prose .maths") == [r"\pi r_1^2", "a_1 + b_2", r"\sum_i x_i"]
    assert "plain <b>text</b>" in texts(page, ".prose .code pre")
    assert "<script>" in page.look("document.querySelector('.prose').innerText")
    links = "[...document.querySelectorAll('.prose a')].map((a) => [a.getAttribute('href'), a.rel])"
    safe = "noopener noreferrer"
    assert page.look(links) == [
        ["https://example.org/manual", safe],
        [None, ""],
        ["https://example.org/cat.png", safe],
    ]
    assert page.look("document.querySelectorAll('.prose :is(img, script, iframe)').length") == 0
    assert page.look("document.title") == "Semantic"


def test_thinking_is_folded_and_tools_are_cards(running: RunningServer, browser: Browser) -> None:
    call = ToolUsePart("call_1", "grep", {"pattern": "price"})
    result = ToolResultPart("call_1", (TextPart("shop.py:12"),))
    keep_turns(
        running,
        "coder",
        exchange("Where?", ThinkingPart("They mean the shop."), TextPart("I look."), call),
        (Message(Role.TOOL, (result,)), Message.of(Role.ASSISTANT, "In `shop.py`.")),
    )
    page = browser.open(f"{running.url}/#/chat/coder")
    page.await_text("In shop.py.", ".prose")
    assert page.look("document.querySelector('.thinking').open") is False
    page.click(".thinking summary")
    page.await_text("They mean the shop.", ".thinking p")
    assert len(texts(page, ".tool")) == 1  # the result is in the card of its call
    page.await_text("done", ".tool summary")
    page.click(".tool summary", "grep")
    page.await_text('"pattern": "price"', ".tool pre")
    page.await_text("shop.py:12", ".tool pre")


def test_old_replies_show_their_speed(running: RunningServer, browser: Browser) -> None:
    keep_turns(running, "parrot", exchange("Again?", TextPart("Again.")))
    page = browser.open(f"{running.url}/#/chat/parrot")
    page.await_text("8 tokens · 28.0 tokens/s · first after 210 ms", ".cost")
    page.await_text("5 of 7 draft tokens accepted", ".cost")
    open_menu(page, ".exchange", "What was reused")
    page.await_text("5 from drafts", ".why .key")


def test_why_shows_the_text_on_both_sides(
    running: RunningServer, http: httpx.Client, browser: Browser
) -> None:
    for day in ("Monday", "Tuesday"):
        said = [{"role": "user", "content": f"{LONG} Today is {day}. What now?"}]
        body = {"model": "fake", "messages": said, "max_tokens": 4}
        http.post("/v1/chat/completions", json=body, headers={"x-agent-id": "diary"})
    page = browser.open(f"{running.url}/#/chat/diary")
    open_menu(page, ".exchange:last-of-type", "What was reused")
    page.await_text("Mon", ".why .old")
    page.await_text("Tues", ".why .new")


def test_a_stopped_reply_is_kept_and_continued(
    browser: Browser, http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="coder")
    page = browser.open(f"{running.url}/#/chat/coder")
    may_go_on = hold(running.server.device, num_steps=6)
    send(page, "Tell me more.")
    page.await_true("document.querySelector('.live .prose')?.innerText.length > 0")
    page.press("Escape")
    may_go_on.set()
    page.await_text("stopped", ".exchange:not(.live) .cost .note")
    [stopped] = get(http, "/v1/agents/coder/turns")["data"]
    assert stopped["finish_reason"] == "cancelled"
    text = stopped["messages"][-1]["content"][0]["text"]
    page.click(".exchange .cost button", "Continue")
    page.await_true("!document.querySelector('.cost .note')?.innerText.includes('stopped')")
    page.await_text("tokens", ".exchange:not(.live) .cost .note")
    [whole] = get(http, "/v1/agents/coder/turns")["data"]
    assert whole["messages"][-1]["content"][0]["text"].startswith(text)
    assert whole["finish_reason"] != "cancelled"


def test_a_message_is_edited_and_a_reply_is_written_again(
    browser: Browser, http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="coder")
    first = say(http, "coder", "one")
    page = browser.open(f"{running.url}/#/chat/coder")
    page.await_text("one", ".said.user")
    page.press("ArrowUp")  # in the empty composer
    page.await_text("Sends in place of the earlier message", ".composer")
    page.await_true(f"{TEXT} === 'one'")
    page.type(" and two")
    page.press("Enter")
    page.await_text("one and two", ".exchange:not(.live) .said.user")
    [edited] = get(http, "/v1/agents/coder/turns")["data"]
    assert edited["parent"] is None
    assert edited["id"] != first["turn_id"]

    page.click(".exchange .cost button", "Regenerate")
    page.await_true("document.querySelectorAll('.person').length === 2")
    await_that(lambda: get(http, "/v1/agents/coder/turns")["data"][:1] not in ([], [edited]))
    [again] = get(http, "/v1/agents/coder/turns")["data"]
    assert again["messages"][0] == edited["messages"][0]
    [kept] = [a for a in get(http, "/v1/agents")["data"] if a["id"] != "coder"]
    assert kept["head"] == edited["id"]


def test_a_reply_goes_on_while_another_view_is_open(
    browser: Browser, http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="coder")
    page = browser.open(f"{running.url}/#/chat/coder")
    may_go_on = hold(running.server.device, num_steps=6)
    send(page, "Tell me more.")
    page.await_true("document.querySelector('.live .prose')?.innerText.length > 0")
    page.click(".rail a", "Models")
    page.await_true("!!document.querySelector('section.models')")
    may_go_on.set()
    await_that(lambda: len(get(http, "/v1/agents/coder/turns")["data"]) == 1)
    [turn] = get(http, "/v1/agents/coder/turns")["data"]
    assert turn["finish_reason"] != "cancelled"
    page.click(".rail a", "Chat")
    page.click(".person", "coder")
    page.await_true("document.querySelectorAll('.exchange:not(.live)').length === 1")
    spoken = "document.querySelector('.announcer[aria-live=polite]').innerText"
    page.await_true(f"{spoken} !== undefined && !document.querySelector('.live')")


def test_a_reply_is_announced_as_it_is_written(
    browser: Browser, http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="coder")
    page = browser.open(f"{running.url}/#/chat/coder")
    send(page, "Tell me more.")
    page.await_text("tokens", ".exchange:not(.live) .cost")
    [turn] = get(http, "/v1/agents/coder/turns")["data"]
    told = "document.querySelector('.announcer[aria-live=polite]').textContent"
    letters = re.sub(r"[^a-z]", "", turn["messages"][-1]["content"][0]["text"])
    page.await_true(f"{told}.replace(/[^a-z]/g, '') === {letters!r}")


# -- keyboard, contrast and a small screen ------------------------------------------------------


def test_menus_work_by_keyboard(
    browser: Browser, http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="coder")
    make(http, id="other")
    page = browser.open(f"{running.url}/#/chat/coder")
    page.await_text("Send a message to coder", ".talk")
    page.await_true("document.querySelectorAll('.person').length === 2")
    page.press("Escape")  # leaves the composer
    page.await_true("document.activeElement === document.body")
    page.press("k" if page.look("document.querySelector('.person').innerText[0]") == "o" else "j")
    page.await_text("other", ".conversation h1")
    page.press("n")
    page.await_text("New chat", ".conversation h1")
    page.look("location.hash = '#/chat/coder'")
    page.await_true("document.activeElement.placeholder === 'Message coder'")
    page.look("document.querySelector('.chat-head .menu summary').focus()")
    page.press("ArrowDown")
    page.await_text("Show it in the graph", ".sheet :focus")
    page.press("ArrowUp")
    page.await_text("Delete", ".sheet :focus")
    page.press("Escape")
    page.await_true("document.activeElement === document.querySelector('.chat-head summary')")
    assert page.look("document.querySelector('.chat-head .menu').open") is False
    page.press("ArrowDown")
    page.press("Enter")
    page.await_text("coder", ".detail h2")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(running: RunningServer, browser: Browser, scheme: str) -> None:
    call = ToolUsePart("call_1", "grep", {"pattern": "price"})
    thought = ThinkingPart("They mean the shop.")
    keep_turns(running, "writer", exchange("How?", thought, TextPart(MARKDOWN), call))
    keep_turns(running, "other", exchange("Why?", TextPart("Because.")))
    page = browser.open(running.url)
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    views = ("chat", "chat/writer", "agents/writer", "compare/writer/other")
    for view in (*views, "memory", "now", "models", "connect"):
        page.look(f"location.hash = '#/{view}'")
        page.await_true(f"!!document.querySelector('section.{view.split('/')[0]}')")
        if view.endswith("writer"):
            page.await_text("How?", ".said, .asked")
        page.look("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert page.look(FAINT) == [], view


def test_a_phone_shows_controls_whole(running: RunningServer, browser: Browser) -> None:
    call = ToolUsePart("call_1", "grep", {"pattern": "price " * 30})
    keep_turns(
        running, "a-rather-long-name-of-an-agent-that-somebody-chose",
        exchange("How? " * 40, TextPart(MARKDOWN), call),
    )  # fmt: skip
    page = browser.open(running.url, width=390, height=780)
    cut = """[...document.querySelectorAll("button, .button, select, .tier, .item")]
      .filter((found) => found.checkVisibility() && found.getClientRects().length)
      .filter((found) => !found.closest(".rows, .sheet"))
      .map((found) => [found.getBoundingClientRect(), found.innerText])
      .filter(([box]) => box.left < 0 || box.right > innerWidth + 0.5)
      .map(([, text]) => text)"""
    page.await_text("Write a message below", ".welcome")
    assert page.look(cut) == []
    page.click(".chat-head button[title=Conversations]")
    page.click(".person", "a-rather-long")
    page.await_text("Steps", ".prose h1")
    assert page.look(cut) == []
    assert page.look("document.documentElement.scrollWidth <= innerWidth")
    page.click(".rail a", "Agents")
    page.await_true("!!document.querySelector('section.agents')")
    assert page.look(cut) == []


# -- a server that stops ------------------------------------------------------------------------


def test_a_server_that_stops_comes_back(tmp_path: Path, browser: Browser) -> None:
    with serve(tmp_path / "home", tmp_path / "log", "--backend", "fake") as first:
        with first.client() as http:
            make(http, id="survivor", system=LONG)
            say(http, "survivor", "one")
        page = browser.open(f"{first.url}/#/chat/survivor")
        page.await_text("one", ".said.user")
    page.await_text("The server does not answer", ".down")
    page.type("are you there?", BOX)
    page.press("Enter")
    page.await_text("Your text is kept", ".composer")
    assert page.look(TEXT) == "are you there?"
    assert page.look("document.querySelector('.composer .main').disabled")
    enabled = "[...document.querySelectorAll('.cost button:enabled')].map((one) => one.innerText)"
    assert page.look(enabled) == ["Copy"]
    assert texts(page, ".down, .toast, .fault") == texts(page, ".down")
    assert texts(page, ".said.user p") == ["one"]

    port = first.url.rsplit(":", 1)[1]
    with serve(tmp_path / "home", tmp_path / "log2", "--backend", "fake", "--port", port):
        page.await_true("!document.querySelector('.down')")
        page.click(BOX)
        page.press("Enter")
        page.await_true("document.querySelectorAll('.exchange:not(.live)').length === 2")


def test_a_message_that_failed_is_not_lost(
    browser: Browser, http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="coder")
    page = browser.open(f"{running.url}/#/chat/coder")
    page.await_text("Send a message", ".talk")
    page.look(
        "window.wrong = '/nothing'; const real = fetch; window.fetch = (path, options) => "
        "real(path.replace('/generate', wrong), options)"
    )
    send(page, "are you there?")
    page.await_text("Try again", ".live .fault")
    page.click(".live button", "Edit the message")
    page.await_true(f"{TEXT} === 'are you there?'")
    page.look("window.wrong = '/generate'")
    page.click(".composer button", "Send")
    page.await_true("document.querySelectorAll('.exchange:not(.live)').length === 1")
    assert len(get(http, "/v1/agents/coder/turns")["data"]) == 1
