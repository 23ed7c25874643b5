"""Kills servers at random moments under load, and checks the directories that they leave."""

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semantic.adapters.outbound.cipher import Cipher, load_cipher
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.chat import Message as SaidMessage
from semantic.entrypoints.cli.app import main
from tests.chaos.changes import Changer
from tests.chaos.talk import PATIENCE_S, Agent, Load, Message, ask
from tests.smoke.server_process import ServerProcess, serve_forked

_LONGEST_START_S = 0.7  # some are killed before they are ready


@dataclass
class Trial:
    """One cache directory, and the servers that are killed over it.

    Attributes:
        durability: `sync`: every reply that was received whole must be there.
        options: What servers are started with.
        most_replies: A server is killed after fewer replies than this.
        changers: Change agents of their own meanwhile.
        is_encrypted: Whether servers encrypt what they keep.
        num_turns: Turns found in the ledger after each kill.
    """

    home: Path
    work: Path
    durability: str
    options: Sequence[str]
    agents: list[Agent]
    seed: int
    most_replies: int = 40
    changers: Sequence[Changer] = ()
    is_encrypted: bool = False
    num_turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)  # noqa: S311 - moments, not secrets
        self.work.mkdir(parents=True, exist_ok=True)
        self._config = self.work / "encryption.toml"
        self._cipher: Cipher | None = None
        self._settings: dict[str, Any] = {}
        if self.is_encrypted:
            key = self.work / "encryption.key"
            key.touch(mode=0o600)
            key.write_text(os.urandom(32).hex())
            self._cipher = load_cipher(key, None)
            self._settings["encryption_key_file"] = str(key)
        self._config.write_text("".join(f"{n} = '{v}'\n" for n, v in self._settings.items()))

    @property
    def cache(self) -> Path:
        return self.work / "cache"

    def kill_once(self) -> None:
        """Start a server, let all agents talk, kill it, and check what is on disk."""
        is_early = self.dice.random() < 0.15
        with self._serve() as server:
            if is_early:
                time.sleep(self.dice.uniform(0, _LONGEST_START_S))
                server.process.send_signal(signal.SIGKILL)
            else:
                server.await_ready()
                load = Load(server.url, [*self.agents, *self.changers])
                self._await_moment(load)
                server.process.send_signal(signal.SIGKILL)
                load.stop()
                assert not load.refusals, load.refusals
            assert server.process.wait(60) == -signal.SIGKILL
        self.check_directory()

    def _await_moment(self, load: Load) -> None:
        """Wait for some replies, and then into the middle of whatever goes on."""
        wanted = self.num_received + self.dice.randrange(self.most_replies)
        while self.num_received < wanted and load.is_talking:
            time.sleep(0.002)
        time.sleep(self.dice.uniform(0, 0.3))

    @property
    def num_received(self) -> int:
        """Replies that all agents received whole."""
        return sum(len(agent.received) for agent in self.agents)

    @property
    def num_changes(self) -> Counter[str]:
        """Changes of each kind that were answered."""
        return sum((changer.counts for changer in self.changers), Counter())

    @property
    def num_answered(self) -> int:
        """Replies and changes."""
        return self.num_received + self.num_changes.total()

    def finish(self) -> None:
        """Let everyone have one more turn on a server that is stopped in order, and check."""
        with self._serve() as server:
            server.await_ready()
            with server.client(timeout=PATIENCE_S) as http:
                for agent in self.agents:
                    agent.take_turn(http)
            assert server.stop() == 0
        assert "Traceback" not in server.output, server.output
        self.check_directory(is_all_written=True)

    def check_replies(self) -> int:
        """Compare every reply with that of a server that keeps nothing; returns how many."""
        options = [*self.options, "--durability", "none"]
        received = [done for agent in self.agents for done in agent.received]
        with (
            serve_forked(self.home, self.work / "reference.log", *options) as server,
            server.client(timeout=PATIENCE_S) as http,
        ):
            for done in received:
                agent = self.agents[0]
                right = ask(http, agent.model, done.messages, agent.max_tokens)
                assert done.reply == right, done
        return len(received)

    def check_directory(self, *, is_all_written: bool = False) -> None:
        """See that everything is sound, and that every turn that must be there is."""
        copy = self.work / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        if not (self.cache / "ledger.db").exists():
            return  # killed before anything was made
        # What a crash left is checked on a copy, so that the next server meets it too.
        shutil.copytree(self.cache, copy, copy_function=_link_blocks)
        options = ["--cache-dir", str(copy), "--config", str(self._config)]
        assert main(["cache", "verify", *options]) == 0
        logged = logged_conversations(copy, self._cipher)
        self.num_turns.append(sum(len(said) // 2 for said in logged.values()))
        for agent in self.agents:
            self._check_agent(agent, logged, is_all_written=is_all_written)
        is_synced = self.durability == "sync" or is_all_written
        with opened(copy, self._cipher) as ledger:
            wrong = [changer.check(ledger, is_synced=is_synced) for changer in self.changers]
        assert not any(wrong), wrong

    def _check_agent(
        self, agent: Agent, logged: dict[str, list[Message]], *, is_all_written: bool
    ) -> None:
        last = {done.agent_id: done for done in agent.received}
        for agent_id, done in last.items():
            said = [*done.messages, {"role": "assistant", "content": done.reply}]
            found = logged.get(agent_id, [])
            # The last turn of an earlier conversation may have gone with a kill for good.
            is_written = is_all_written and agent_id == agent.agent_id
            if self.durability == "sync" or is_written:
                assert found[: len(said)] == said, (agent_id, found, said)
            else:
                # What is there is right; the latest may be missing.
                known = said if agent_id != agent.agent_id else [*said, *agent.asked[len(said) :]]
                assert found[: len(known)] == known[: len(found)], (agent_id, found, known)

    def _serve(self) -> contextlib.AbstractContextManager[ServerProcess]:
        options = [*self.options, "--durability", self.durability, "--cache-dir", str(self.cache)]
        log = self.work / "server.log"
        settings = {**self._settings, "shutdown_timeout_s": 60}
        return serve_forked(self.home, log, *options, is_ready=False, **settings)


def _link_blocks(source: str, target: str) -> None:
    """Copy the ledger; block files never change, so that a link is as good as a copy."""
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


@contextlib.contextmanager
def opened(cache: Path, cipher: Cipher | None = None) -> Iterator[SqliteLedger]:
    """The ledger of a directory."""
    ledger = SqliteLedger(cache, cipher=cipher)
    ledger.load()
    try:
        yield ledger
    finally:
        ledger.close()


def logged_conversations(cache: Path, cipher: Cipher | None = None) -> dict[str, list[Message]]:
    """What every agent said and heard, by the ledger."""
    found: dict[str, list[Message]] = {}
    with opened(cache, cipher) as ledger:
        for agent in ledger.load().agents:
            turns = ledger.turns(agent.tenant, agent.head, limit=1000) if agent.head else ()
            assert len(turns) == agent.num_turns
            found[agent.id] = [_plain(m) for turn in reversed(turns) for m in turn.messages]
    return found


def _plain(message: SaidMessage) -> Message:
    return {"role": message.role.value, "content": message.text}
