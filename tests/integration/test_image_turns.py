"""Turns with images, from the request to the ledger and back, on the fake model that takes them."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from semantic.domain.agents import Agent
from semantic.domain.chat import (
    AgentHint,
    ChatRequest,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolResultPart,
    images_in,
)
from semantic.domain.errors import InvalidRequestError, QuotaExceededError
from semantic.domain.events import Failed, Finished, TextDelta, Usage
from semantic.domain.sampling import SamplingParams, StopRules
from semantic.entrypoints.bootstrap import Server, bootstrap
from semantic.ports.inbound import Compaction, ModelState, NewTurn, Reply
from tests.http_server import make_settings
from tests.pictures import picture
from tests.waiting import await_that

pytestmark = pytest.mark.integration

GREEDY = SamplingParams(temperature=0)
STOP = StopRules(max_tokens=8, ignore_eos=True)
LONG = "Look at the picture and say what it shows. " * 30


def image(seed: int, size: tuple[int, int] = (128, 96)) -> ImagePart:
    data = picture(size, (seed, 2 * seed, 3 * seed))
    return ImagePart(hashlib.sha256(data).hexdigest(), "image/png", *size, data)


def user(*parts: Part | str) -> Message:
    return Message(Role.USER, tuple(TextPart(p) if isinstance(p, str) else p for p in parts))


def assistant(text: str) -> Message:
    return Message.of(Role.ASSISTANT, text)


@dataclass(frozen=True)
class Said:
    """A reply's text and what it took."""

    text: str
    usage: Usage


@dataclass(frozen=True)
class Bench:
    """A server without HTTP."""

    server: Server

    @property
    def principal(self) -> Any:
        return self.server.memory.agents.principal()

    def ask(self, *messages: Message, agent: AgentHint | str = "") -> Said:
        """Send a whole conversation, as most clients do."""
        hint = agent if isinstance(agent, AgentHint) else AgentHint(agent_id=agent or None)
        request = ChatRequest("", messages, sampling=GREEDY, stop=STOP, agent=hint)
        return self._run(lambda: self.server.inference.start(request, self.principal))

    def tell(self, agent: str, *messages: Message) -> Said:
        """Send new messages only; the server keeps the conversation."""
        turn = NewTurn(messages, GREEDY, STOP)
        return self._run(lambda: self.server.chat.generate(self.principal, agent, turn))

    def make(self, agent: str) -> None:
        self.server.memory.agents.create(Agent(agent, 1.0, last_used=1.0))

    def _run(self, start: Callable[[], Coroutine[Any, Any, Reply]]) -> Said:
        async def read() -> Said:
            texts: list[str] = []
            async for event in await start():
                match event:
                    case TextDelta(text):
                        texts.append(text)
                    case Failed(error):
                        raise error
                    case Finished(_, usage):
                        return Said("".join(texts), usage)
            raise AssertionError("the reply did not end")

        return asyncio.run(read())


@contextlib.contextmanager
def served(home: Path, **settings: Any) -> Iterator[Bench]:
    server = bootstrap(make_settings(home, **{"model": "fake-vision", **settings}))
    server.start()
    try:
        await_that(lambda: server.device.state is not ModelState.LOADING, 60)
        yield Bench(server)
    finally:
        server.request_stop()
        assert server.device.join(60)
        assert server.memory.close(60)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with served(tmp_path / "home") as made:
        yield made


def conversation(bench: Bench, *images: ImagePart) -> list[Message]:
    """A conversation that asks about one image after another."""
    messages = [Message.of(Role.SYSTEM, LONG)]
    for number, each in enumerate(images):
        messages.append(user(f"What is this, number {number}?", each, "Say it."))
        messages.append(assistant(bench.ask(*messages, agent="a").text))
    return messages


def fresh(home: Path, messages: Sequence[Message]) -> str:
    """The reply of a server that has seen nothing."""
    with served(home) as bench:
        return bench.ask(*messages).text


def test_the_next_turn_reuses_images_and_another_image_reuses_the_text_before(
    bench: Bench, tmp_path: Path
) -> None:
    said = conversation(bench, image(1), image(2))

    next_turn = [*said, user("And now?")]
    answer = bench.ask(*next_turn, agent="a")
    assert answer.text == fresh(tmp_path / "one", next_turn)
    assert answer.usage.cache_read_tokens > answer.usage.prompt_tokens - 40

    other = [*said[:3], user("What is this, number 1?", image(3), "Say it.")]
    changed = bench.ask(*other)
    assert changed.text == fresh(tmp_path / "two", other)
    shared = bench.ask(*said[:3], user("What is this, number 1?", "x")).usage
    assert changed.usage.cache_read_tokens == shared.cache_read_tokens


def test_the_server_keeps_the_images_of_a_conversation(tmp_path: Path) -> None:
    with served(tmp_path / "home") as bench:
        bench.make("a")
        first = bench.tell("a", user(LONG, image(1)))
        second = bench.tell("a", user(ToolResultPart("call", (TextPart("see"), image(2)))))
        agents = bench.server.memory.agents
        logged = agents.conversation(agents.get("local", "a"))
    parts = [part for message in logged for part in message.parts]
    assert [part.data for part in parts if isinstance(part, ImagePart)] == [b""]
    whole = [
        user(LONG, image(1)),
        assistant(first.text),
        user(ToolResultPart("call", (TextPart("see"), image(2)))),
    ]
    assert second.text == fresh(tmp_path / "fresh", whole)

    # After a restart, and without any KV cache, from the ledger alone.
    for name in ("blocks", "kept"):
        with served(tmp_path / "home") as bench:
            agents = bench.server.memory.agents
            if name == "blocks":
                bench.server.memory.served.get().upkeep.evict(
                    agents.get("local", "a"), is_cold=True
                )
            agents.fork("local", "a", [name])
            again = bench.tell(name, user("And now?"))
        whole_again = [*whole, assistant(second.text), user("And now?")]
        assert again.text == fresh(tmp_path / f"fresh-{name}", whole_again)


def test_a_rewound_agent_goes_on_with_another_image(bench: Bench, tmp_path: Path) -> None:
    agents = bench.server.memory.agents
    bench.make("a")
    first = bench.tell("a", user(LONG, image(1)))
    turn = agents.get("local", "a").head
    bench.tell("a", user(image(2)))
    agents.rewind("local", "a", turn)

    again = bench.tell("a", user(image(3), "?"))

    whole = [user(LONG, image(1)), assistant(first.text), user(image(3), "?")]
    assert again.text == fresh(tmp_path / "fresh", whole)
    assert again.usage.cache_read_tokens > len(LONG)


def test_a_compacted_agent_keeps_the_images_of_its_latest_turns(
    bench: Bench, tmp_path: Path
) -> None:
    bench.make("a")
    for number in range(3):
        bench.tell("a", user(f"{LONG}{number}", image(number)))
    sampling = SamplingParams(temperature=4, seed=5)  # with which the fake model's replies end
    ask = Compaction(new_id="b", keep_turns=1, max_tokens=4096, sampling=sampling)

    asyncio.run(bench.server.compaction.compact(bench.principal, "a", ask))

    agents = bench.server.memory.agents
    kept = agents.conversation(agents.get("local", "b"))
    assert [part.digest for part in images_in(kept)] == [image(2).digest]
    said = bench.tell("b", user("?"))
    whole = [
        replace(m, parts=tuple(image(2) if isinstance(p, ImagePart) else p for p in m.parts))
        for m in kept
    ]
    assert said.text == fresh(tmp_path / "fresh", [*whole, user("?")])


def test_a_changed_image_is_named(bench: Bench) -> None:
    said = conversation(bench, image(1), image(2, (800, 600)))
    shown = [*said[:3], user("What is this, number 1?", image(3, (1024, 768)), "Say it.")]
    bench.ask(*shown, said[4], user("So?"), agent="a")

    agents = bench.server.memory.agents
    turn = agents.turn("local", agents.get("local", "a").head or "")

    assert turn is not None
    assert turn.miss is not None
    assert turn.miss.detail == "image 2 differs (1024x768 instead of 800x600)"
    explained = bench.server.agents.explain(bench.principal, "a").divergence
    assert explained is not None
    assert explained.before.endswith("number 1?")
    assert explained.expected.startswith("[image]")
    assert explained.actual.startswith("[image]")


def test_an_exported_agent_continues_elsewhere_with_equal_tokens(tmp_path: Path) -> None:
    with served(tmp_path / "home") as bench:
        bench.make("a")
        bench.tell("a", user(LONG, image(1), "?"))
        bench.tell("a", user(image(2), image(1)))
        content = b"".join(bench.server.transfer.export(bench.principal, "a"))
        expected = bench.tell("a", user("And now?"))
    key = (tmp_path / "home" / "export.key").read_text().strip()
    trust = {"there": {"trusted_export_keys": {"friend": key}}, "stranger": {}}
    for name, settings in trust.items():
        with served(tmp_path / name, **settings) as bench:
            taken = bench.server.transfer.import_agent(
                bench.principal, lambda: [content], None, is_messages_only=False
            )
            assert taken.has_state == bool(settings)
            answer = bench.tell("a", user("And now?"))
        assert answer == (expected if settings else replace(answer, text=expected.text))
    small = {"max_image_mpixels": 0.001}
    with served(tmp_path / "small", **small) as bench:
        with pytest.raises(InvalidRequestError, match=r"image .* is refused: .* pixels"):
            bench.server.transfer.import_agent(
                bench.principal, lambda: [content], None, is_messages_only=True
            )
        assert not bench.server.memory.agents.agents("local")


def test_images_are_deleted_with_the_last_turn_that_refers_to_them(bench: Bench) -> None:
    agents, ledger = bench.server.memory.agents, bench.server.memory.ledger
    for name in ("a", "b"):
        bench.make(name)
        bench.tell(name, user(LONG, image(1)))
    bench.tell("b", user(image(2)))
    bench.server.memory.disk.flush(30)  # type: ignore[union-attr]
    assert ledger.image("local", image(2).digest) == image(2).data

    agents.delete("local", "b")
    bench.server.memory.disk.flush(30)  # type: ignore[union-attr]
    ledger.forget_unreachable(before=2e9, replays_before=0.0)

    assert ledger.image("local", image(1).digest) == image(1).data
    assert ledger.image("local", image(2).digest) is None


def test_images_count_in_the_quota_of_a_tenant(tmp_path: Path) -> None:
    big = os.urandom(2**20)
    part = ImagePart(hashlib.sha256(big).hexdigest(), "image/png", 8, 8, big)
    with served(tmp_path / "home", tenant_disk_quota_mb=1) as bench:
        bench.make("a")
        bench.tell("a", user(part))
        with pytest.raises(QuotaExceededError):
            bench.tell("a", user("?"))


def test_an_encrypted_ledger_has_no_image_in_any_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    with served(tmp_path / "home", encryption_key_file=key) as bench:
        bench.make("a")
        first = bench.tell("a", user(LONG, image(1)))
    files = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not [path for path in files if image(1).data[24:] in path.read_bytes()]
    with served(tmp_path / "home", encryption_key_file=key) as bench:
        agents = bench.server.memory.agents
        bench.server.memory.served.get().upkeep.evict(agents.get("local", "a"), is_cold=True)
        again = bench.tell("a", user("?"))
    whole = [user(LONG, image(1)), assistant(first.text), user("?")]
    assert again.text == fresh(tmp_path / "fresh", whole)


def test_an_ephemeral_request_leaves_no_image_behind(bench: Bench) -> None:
    message = user(LONG, image(1))

    said = bench.ask(message, agent=AgentHint(is_ephemeral=True))

    assert bench.server.memory.ledger.image("local", image(1).digest) is None
    assert said.text == bench.ask(message).text


def test_images_are_refused_where_no_template_shows_them(bench: Bench) -> None:
    for role in (Role.SYSTEM, Role.ASSISTANT):
        with pytest.raises(InvalidRequestError, match=f"not allowed in {role.value} messages"):
            bench.ask(user("a"), Message(role, (image(1),)), user("b"))


def test_a_text_model_refuses_images(tmp_path: Path) -> None:
    with served(tmp_path / "home", model="fake") as bench:
        with pytest.raises(InvalidRequestError, match="does not accept images") as caught:
            bench.ask(user("a", image(1)))
        assert caught.value.param == "messages[0].content[1]"
