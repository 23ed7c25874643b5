"""`semantic cache`: look at a cache directory, check it, and clean it, while no server has it."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rich.status import Status

from semantic.adapters.config.settings import Settings
from semantic.adapters.outbound.blocks.agent_archive import own_key
from semantic.adapters.outbound.blocks.directory import DirectoryLock, claim
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.tree import TEMPORARY
from semantic.adapters.outbound.cipher import load_cipher
from semantic.adapters.outbound.ledger.sqlite import LEDGER_FILE, SqliteLedger
from semantic.adapters.outbound.models.fingerprint import known_models
from semantic.application.agents.ledger import AgentLedger, write_at_once
from semantic.application.cache.index import BlockIndex
from semantic.application.prompt.replay import REPLAY_TTL_S
from semantic.domain.agents import Agent
from semantic.domain.blocks import BlockPart
from semantic.domain.errors import (
    CacheCorruptionError,
    CachePersistenceError,
    InvalidRequestError,
)
from semantic.entrypoints.cli.client import Json
from semantic.entrypoints.cli.flags import Answer
from semantic.entrypoints.cli.screen import size, working
from semantic.ports.storage import DropPart, LedgerChange, LedgerState, MarkIndexWhole, PutPart

_SHORT = 12


def run_cache(action: str, settings: Settings, orphan_age_h: float | None = None) -> Answer:
    """Do one of the commands.

    Raises:
        InvalidRequestError: there is no such directory, it is not a cache, or a server has it.
        CachePersistenceError: what is there cannot be opened.
    """
    if action == "export-key":
        key = own_key(settings.export_key_file).hex()
        return Answer({"key": key}, key)
    directory = settings.effective_cache_dir
    if not (directory / LEDGER_FILE).exists() and not (directory / "blocks").is_dir():
        raise InvalidRequestError(
            f"there is no cache in {directory}; name its place with --cache-dir or --home",
            param="cache_dir",
        )
    claim(directory)
    with ExitStack() as stack:
        status = stack.enter_context(working(f"reading {directory}"))
        stack.enter_context(DirectoryLock(directory))
        cipher = load_cipher(settings.encryption_key_file, settings.encryption_key_command)
        ledger = SqliteLedger(directory, cipher=cipher)
        state = ledger.load()
        stack.callback(ledger.close)
        files = SafetensorsCache(directory, cipher=cipher)
        cache = _Cache(settings, ledger, files, state, status)
        if action == "stats":
            found = cache.stats()
        elif action == "verify":
            found = cache.verify()
        else:
            age_h = settings.orphan_ttl_h if orphan_age_h is None else orphan_age_h
            found = cache.collect(time.time() - age_h * 3600)
    is_bad = bool(found.get("bad")) or not found.get("ledger_sound", True)
    return Answer(found, "\n".join(cache.lines), status=int(is_bad))


@dataclass(slots=True)
class _Cache:
    """A directory that is ours for the time of a command.

    Attributes:
        status: Tells people how far it is.
        lines: What was found, in words; methods return it for scripts.
    """

    settings: Settings
    ledger: SqliteLedger
    files: SafetensorsCache
    state: LedgerState
    status: Status
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    # -- stats ----------------------------------------------------------------------------------

    def stats(self) -> Json:
        # Scanning moves bad files to quarantine; stats should change nothing if possible.
        is_lost = self.state.is_index_lost
        parts = list(self.files.scan()) if is_lost else list(self.state.parts)
        used = self.files.used_bytes()
        budget = self.settings.disk_budget_mb * 2**20
        self.say(f"directory  {self.settings.effective_cache_dir}")
        self.say(f"agents     {len(self.state.agents):,}")
        self.say(f"turns      {self.ledger.num_turns():,}")
        self.say(f"files      {len(parts):,}, {size(sum(part.nbytes for part in parts))}")
        models = self._by_model(parts)
        for (model, kv_format), (number, nbytes) in models.items():
            self.say(f"  {model} ({kv_format}): {number:,}, {size(nbytes)}")
        others = self.files.other_bytes()
        self.say(
            f"in all     {size(used)} of {size(budget)} ({used / budget:.1%}), "
            f"{size(others)} of it for the ledger and its backup"
        )
        self._tell_problem()
        return {
            "directory": str(self.settings.effective_cache_dir),
            "agents": len(self.state.agents),
            "turns": self.ledger.num_turns(),
            "files": len(parts),
            "models": [
                {"model": model, "kv_format": kv_format, "files": number, "bytes": nbytes}
                for (model, kv_format), (number, nbytes) in models.items()
            ],
            "used_bytes": used,
            "budget_bytes": budget,
            "other_bytes": others,
            "problem": self.state.problem or "",
        }

    def _by_model(self, parts: Sequence[BlockPart]) -> dict[tuple[str, str], tuple[int, int]]:
        names = known_models(self.settings.home_dir / "models" / "fingerprints.json")
        origins = {}
        for part in {part.root: part for part in parts}.values():
            try:
                fingerprint, kv_format = self.files.origin(part)
            except CacheCorruptionError:
                fingerprint, kv_format = "unknown", "unknown"
            origins[part.root] = (names.get(fingerprint, fingerprint[:_SHORT]), kv_format)
        numbers = Counter(origins[part.root] for part in parts)
        sizes: Counter[tuple[str, str]] = Counter()
        for part in parts:
            sizes[origins[part.root]] += part.nbytes
        return {origin: (number, sizes[origin]) for origin, number in numbers.most_common()}

    # -- verify ---------------------------------------------------------------------------------

    def verify(self) -> Json:
        is_ledger_sound = self._verify_ledger()
        removed: list[tuple[str, str]] = []
        sound = list(self.files.scan(lambda *what: removed.append(what)))
        unfinished = [name for name, _ in removed if name.endswith(TEMPORARY)]
        bad = [what for what in removed if what[0] not in unfinished]
        num_files = len(sound) + len(bad)
        for number, part in enumerate(tuple(sound), start=1):
            self.status.update(f"checking file {number:,} of {len(sound):,}")
            try:
                self.files.read(part)
            except CacheCorruptionError as error:
                bad.append((self.files.place(part), error.message))
                self.files.quarantine(part)
                sound.remove(part)
        self._write_index(sound)
        for name, reason in bad:
            self.say(f"bad: {name}: {reason}; moved to quarantine")
        if unfinished:
            unfinished_files = _count(len(unfinished), "unfinished file")
            self.say(f"moved {unfinished_files} of a killed server to quarantine")
        self.say(
            f"checked {_count(num_files, 'file')} "
            f"({size(sum(part.nbytes for part in sound))} are sound), "
            f"{_count(len(self.state.agents), 'agent')} and "
            f"{_count(self.ledger.num_turns(), 'turn')}: "
            f"{_count(len(bad), 'bad file')}; "
            f"the ledger is {'sound' if is_ledger_sound else 'not sound'}"
        )
        return {
            "files": num_files,
            "sound_bytes": sum(part.nbytes for part in sound),
            "agents": len(self.state.agents),
            "turns": self.ledger.num_turns(),
            "bad": [{"file": name, "reason": reason} for name, reason in bad],
            "unfinished": len(unfinished),
            "ledger_sound": is_ledger_sound,
            "problem": self.state.problem or "",
        }

    def _verify_ledger(self) -> bool:
        """Read all agents and turns; what is bad is restored from the backup."""
        if self._tell_problem():
            return False
        damaged = [agent for agent in self.state.agents if not self._is_sound(agent)]
        if not damaged:
            return True
        self.say(f"bad: turns of {', '.join(agent.id for agent in damaged)}")
        self.state = self.ledger.load()
        self._tell_problem()
        return False

    def _is_sound(self, agent: Agent) -> bool:
        if agent.head is None:
            return True
        try:
            turns = self.ledger.turns(agent.tenant, agent.head, limit=agent.num_turns + 1)
        except CachePersistenceError:
            return False
        return len(turns) == agent.num_turns

    def _tell_problem(self) -> bool:
        if self.state.problem:
            self.say(f"ledger     {self.state.problem}")
        return bool(self.state.problem)

    # -- gc -------------------------------------------------------------------------------------

    def collect(self, before: float) -> Json:
        AgentLedger(self.ledger, self.state, write_at_once(self.ledger)).expire()
        num_turns = self.ledger.forget_unreachable(
            before=before, replays_before=time.time() - REPLAY_TTL_S
        )
        index, last_used = BlockIndex(), {part.key: part.last_used for part in self.state.parts}
        parts = [
            replace(part, last_used=max(part.last_used, last_used.get(part.key, 0.0)))
            for part in self.files.scan()
        ]
        for part in parts:
            index.add(part.root, part.parent, part.start, part.tokens)
        reached = index.reachable(pointer.block for pointer in self.ledger.pointers())
        kept = [part for part in parts if part.name in reached or part.last_used >= before]
        names = {part.key for part in kept}
        gone = [part for part in parts if part.key not in names]
        for part in gone:
            self.files.delete(part)
        self._write_index(kept)
        freed = self.files.empty_quarantine(before=before)
        if freed:
            self.say(f"deleted {size(freed)} of bad files in quarantine")
        self.say(
            f"deleted {_count(len(gone), 'file')} ({size(sum(part.nbytes for part in gone))}) "
            f"and {_count(num_turns, 'turn')} that no agent reaches; left: "
            f"{_count(len(kept), 'file')} ({size(sum(part.nbytes for part in kept))})"
        )
        return {
            "deleted_files": len(gone),
            "deleted_bytes": sum(part.nbytes for part in gone),
            "deleted_turns": num_turns,
            "quarantine_bytes": freed,
            "files": len(kept),
            "bytes": sum(part.nbytes for part in kept),
        }

    def _write_index(self, parts: Sequence[BlockPart]) -> None:
        """Let the ledger's index say what is there."""
        known = {part.key: part for part in self.state.parts}
        there = {part.key for part in parts}
        changes: list[LedgerChange] = [DropPart(key) for key in known if key not in there]
        changes += [PutPart(part) for part in parts if part.key not in known]
        self.ledger.apply([*changes, MarkIndexWhole()], is_synced=False)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s" if number else f"no {noun}s"
