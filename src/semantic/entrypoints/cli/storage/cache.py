"""`semantic cache`: inspect, check and clean a cache directory, or ask the server that uses it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TypeAlias

from semantic.adapters.config.settings import Settings
from semantic.adapters.outbound.blocks.agent_archive import own_key
from semantic.adapters.outbound.blocks.directory import DirectoryInUseError, DirectoryLock, claim
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.listing import TEMPORARY
from semantic.adapters.outbound.cipher import load_cipher
from semantic.adapters.outbound.ledger.sqlite import LEDGER_FILE, SqliteLedger
from semantic.adapters.outbound.models.fingerprint import known_models
from semantic.application.agents.ledger import AgentLedger
from semantic.application.agents.upkeep import Upkeep
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.domain.agents import Agent
from semantic.domain.blocks import BlockPart, PartKey
from semantic.domain.errors import CachePersistenceError, InvalidRequestError
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.entrypoints.cli.client import Json, ServerClient
from semantic.entrypoints.cli.flags import Answer
from semantic.entrypoints.cli.screen import Spinner, size
from semantic.ports.storage import LedgerState

_SHORT = 12
_FLUSH_S = 3600.0
# No model is loaded: only the block length of this geometry matters, and all kinds are kept.
_SPEC = ModelCacheSpec("none", (LayerSpec(LayerKind.FULL, 1, 1, 1),), vocab_size=1, max_context=1)
# A model, the layout and dtype of its KV cache (ABI), and the storage format.
_Origin: TypeAlias = tuple[str, str, str]


def run_cache(
    action: str, settings: Settings, orphan_age_h: float | None = None, key: str | None = None
) -> Answer:
    """Run one of the commands: stats, verify, gc or export-key.

    Args:
        orphan_age_h: For gc, the least age of orphans to delete; None applies the setting.
        key: Sent to the server that uses the directory, if there is one.

    Raises:
        InvalidRequestError: there is no such directory, it is not a cache, or a process uses it
            that is no server.
        CachePersistenceError: the ledger or its files cannot be opened.
        ServerError: the server that uses the directory refused, or did not answer.
    """
    if action == "export-key":
        key = own_key(settings.export_key_file).hex()
        return Answer({"key": key}, key)
    directory = settings.effective_cache_dir
    if not (directory / LEDGER_FILE).exists() and not (directory / "blocks").is_dir():
        raise InvalidRequestError(
            f"no cache in {directory}; set its location with --cache-dir or --home",
            param="cache_dir",
        )
    claim(directory)
    try:
        return _run_alone(action, settings, orphan_age_h)
    except DirectoryInUseError as error:
        if not error.url:
            raise
        with ServerClient(error.url, key) as client, Spinner(f"asking {error.url}") as status:
            return _ask_server(action, directory, client, orphan_age_h, status)


def _run_alone(action: str, settings: Settings, orphan_age_h: float | None) -> Answer:
    directory = settings.effective_cache_dir
    with ExitStack() as stack:
        status = stack.enter_context(Spinner(f"reading {directory}"))
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
            found = cache.collect(age_h * 3600)
    is_bad = bool(found.get("bad")) or not found.get("ledger_sound", True)
    if cache.incomplete:
        found["incomplete"] = cache.incomplete
    note = f"semantic: incomplete: {cache.incomplete}" if cache.incomplete else ""
    return Answer(found, "\n".join(cache.lines), note, status=int(is_bad or bool(note)))


def _ask_server(
    action: str,
    directory: Path,
    client: ServerClient,
    orphan_age_h: float | None,
    status: Spinner,
) -> Answer:
    if action == "stats":
        return _served_stats(directory, client)
    if action == "gc":
        body = {} if orphan_age_h is None else {"orphan_age_s": orphan_age_h * 3600}
        freed = client.call("POST", "/v1/cache/gc", json=body)["freed_bytes"]
        return Answer({"freed_bytes": freed}, f"{client.url} deleted {size(freed)} of orphans")
    found: Json = {}
    for event in client.events("POST", "/v1/cache/verify"):
        found = {name: event[name] for name in ("checked", "total", "bad")}
        status.show(f"checking file {event['checked']:,} of {event['total']:,}")
    bad = _count(found["bad"], "bad file")
    shown = f"{client.url} checked {_count(found['checked'], 'file')}: {bad}"
    return Answer(found, shown, status=int(found["bad"] > 0))


def _served_stats(directory: Path, client: ServerClient) -> Answer:
    found = client.call("GET", "/v1/cache")
    disk, num_agents = found["disk"], sum(found["agents"].values())
    used, budget = disk["used"] + disk["other"], disk["budget"]
    lines = [
        f"directory  {directory}, in use by {client.url}",
        f"agents     {num_agents:,}",
        f"files      {disk['files']:,}, {size(disk['used'])}",
        _total(used, budget, disk["other"]),
        *([f"problem    {disk['problem']}"] if disk["problem"] else []),
    ]
    value = {
        "directory": str(directory),
        "server": client.url,
        "agents": num_agents,
        "files": disk["files"],
        "used_bytes": used,
        "budget_bytes": budget,
        "other_bytes": disk["other"],
        "problem": disk["problem"],
    }
    return Answer(value, "\n".join(lines))


def _total(used: int, budget: int, others: int) -> str:
    return (
        f"total      {size(used)} of {size(budget)} ({used / budget:.1%}), "
        f"{size(others)} of it for the ledger and its backup"
    )


@dataclass(slots=True)
class _Cache:
    """A cache directory that the command has locked.

    Attributes:
        status: Shows progress on a terminal.
        lines: The results as text; methods return the same results as JSON.
        incomplete: Why the command could not finish; empty if it did.
    """

    settings: Settings
    ledger: SqliteLedger
    files: SafetensorsCache
    state: LedgerState
    status: Spinner
    lines: list[str] = field(default_factory=list)
    incomplete: str = ""

    def say(self, line: str) -> None:
        self.lines.append(line)

    # -- stats ----------------------------------------------------------------------------------

    def stats(self) -> Json:
        # Scanning moves damaged files to quarantine, so scan only if the index is lost.
        is_lost = self.state.is_index_lost
        parts = list(self.files.scan()) if is_lost else list(self.state.parts)
        used = self.files.used_bytes()
        budget = self.settings.runtime.disk_bytes
        self.say(f"directory  {self.settings.effective_cache_dir}")
        self.say(f"agents     {len(self.state.agents):,}")
        self.say(f"turns      {self.ledger.num_turns():,}")
        self.say(f"files      {len(parts):,}, {size(sum(part.nbytes for part in parts))}")
        models = self._by_model(parts)
        for (model, abi, kv_format), (number, nbytes) in models.items():
            self.say(f"  {model} ({abi}, {kv_format}): {number:,}, {size(nbytes)}")
        others = self.files.other_bytes()
        self.say(_total(used, budget, others))
        self._tell_problem()
        return {
            "directory": str(self.settings.effective_cache_dir),
            "agents": len(self.state.agents),
            "turns": self.ledger.num_turns(),
            "files": len(parts),
            "models": [
                {
                    "model": model,
                    "abi": abi,
                    "kv_format": kv_format,
                    "files": number,
                    "bytes": nbytes,
                }
                for (model, abi, kv_format), (number, nbytes) in models.items()
            ],
            "used_bytes": used,
            "budget_bytes": budget,
            "other_bytes": others,
            "problem": self.state.problem or "",
        }

    def _by_model(self, parts: Sequence[BlockPart]) -> dict[_Origin, tuple[int, int]]:
        names = known_models(self.settings.home_dir / "models" / "fingerprints.json")
        origins = {
            origin.root: (
                names.get(origin.fingerprint, origin.fingerprint[:_SHORT]),
                origin.abi,
                origin.kv_format,
            )
            for origin in self.files.origins()
        }
        numbers: Counter[_Origin] = Counter()
        sizes: Counter[_Origin] = Counter()
        for part in parts:
            origin = origins.get(part.root, ("unknown",) * 3)
            numbers[origin] += 1
            sizes[origin] += part.nbytes
        return {origin: (number, sizes[origin]) for origin, number in numbers.most_common()}

    # -- verify ---------------------------------------------------------------------------------

    def verify(self) -> Json:
        is_ledger_sound = self._verify_ledger()
        removed: list[tuple[str, str]] = []
        num_files = sum(1 for _ in self.files.scan(lambda *what: removed.append(what)))
        unfinished = [name for name, _ in removed if name.endswith(TEMPORARY)]
        bad = [what for what in removed if what[0] not in unfinished]
        num_files += len(bad)
        with self._upkeep() as (store, upkeep):
            upkeep.reconcile()

            def on_bad(part: BlockPart, reason: str) -> None:
                bad.append((self.files.relative_path(part), reason))

            for at in upkeep.verify(on_bad):
                self.status.show(f"checking file {at.num_checked:,} of {at.num_total:,}")
            sound_bytes = sum(_files(store).values())
            num_turns = self.ledger.num_turns()
        for name, reason in bad:
            self.say(f"bad: {name}: {reason}; moved to quarantine")
        if unfinished:
            unfinished_files = _count(len(unfinished), "unfinished file")
            self.say(f"moved {unfinished_files} of a killed server to quarantine")
        self.say(
            f"checked {_count(num_files, 'file')} "
            f"({size(sound_bytes)} are sound), "
            f"{_count(len(self.state.agents), 'agent')} and "
            f"{_count(num_turns, 'turn')}: "
            f"{_count(len(bad), 'bad file')}; "
            f"the ledger is {'sound' if is_ledger_sound else 'not sound'}"
        )
        return {
            "files": num_files,
            "sound_bytes": sound_bytes,
            "agents": len(self.state.agents),
            "turns": num_turns,
            "bad": [{"file": name, "reason": reason} for name, reason in bad],
            "unfinished": len(unfinished),
            "ledger_sound": is_ledger_sound,
            "problem": self.state.problem or "",
        }

    def _verify_ledger(self) -> bool:
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

    def collect(self, age_s: float) -> Json:
        num_turns = self.ledger.num_turns()
        with self._upkeep(age_s) as (store, upkeep):
            upkeep.reconcile()
            before = _files(store)
            freed = upkeep.collect()
            kept = _files(store)
            num_turns -= self.ledger.num_turns()
        gone_bytes = sum(before[key] for key in before.keys() - kept.keys())
        num_gone, left_bytes = len(before) - len(kept), sum(kept.values())
        if freed > gone_bytes:
            self.say(f"deleted {size(freed - gone_bytes)} of bad files in quarantine")
        self.say(
            f"deleted {_count(num_gone, 'file')} ({size(gone_bytes)}) "
            f"and {_count(num_turns, 'turn')} that no agent reaches; left: "
            f"{_count(len(kept), 'file')} ({size(left_bytes)})"
        )
        return {
            "freed_bytes": freed,
            "deleted_files": num_gone,
            "deleted_bytes": gone_bytes,
            "deleted_turns": num_turns,
            "quarantine_bytes": freed - gone_bytes,
            "files": len(kept),
            "bytes": left_bytes,
        }

    @contextmanager
    def _upkeep(self, orphan_ttl_s: float = inf) -> Iterator[tuple[AgentCacheStore, Upkeep]]:
        disk = DiskTier(self.files, self.ledger, DiskLimits(0, 0))
        agents = AgentLedger(self.ledger, self.state, disk.change)
        store = AgentCacheStore(BlockPool(_SPEC, 0), disk, on_moved=agents.log.move)
        store.restore_index(self.state.parts)
        disk.start(store.is_on_disk)
        upkeep = Upkeep(
            store, agents, self.ledger, disk, files=self.files, orphan_ttl_s=orphan_ttl_s
        )
        try:
            yield store, upkeep
        finally:
            is_flushed = disk.flush(_FLUSH_S)
            is_written = disk.close(_FLUSH_S) and is_flushed
        if not is_written:
            self.incomplete = f"not all changes were written within {_FLUSH_S:.0f} s"
        self.incomplete = upkeep.problem or disk.problem or self.incomplete


def _files(store: AgentCacheStore) -> dict[PartKey, int]:
    return {file.key: file.nbytes for node in store.nodes() for file in node.files.values()}


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s" if number else f"no {noun}s"
