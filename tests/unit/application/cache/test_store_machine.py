"""Random lives of agents against a plain dictionary: what is recalled is right, or is not recalled.

Files are spoilt, disks fill up and servers restart on the way. Conversations are never lost,
budgets never exceeded, and the parts of the store agree after every step.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.application.cache.restore_plan import RestorePlan, WantedPart
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits
from semantic.domain.agents import LOCAL_TENANT
from semantic.domain.errors import PoolExhaustedError
from semantic.domain.spec import LayerKind
from tests.unit.application.engine_rig import ROOT
from tests.unit.application.memory_rig import MemoryRig, RigLimits

pytestmark = pytest.mark.unit

SPECS = {
    "full": fake_spec(block_tokens=4),
    "short window": fake_spec(block_tokens=4, window=3),
    "long window": fake_spec(block_tokens=4, window=6),
    "state": fake_spec(block_tokens=4, has_state=True),
    "all": fake_spec(block_tokens=4, window=6, has_state=True),
}
NAMES = ("ann", "bob", "cid")
# Few words and few systems, so that conversations often begin alike.
SYSTEMS: tuple[list[int], ...] = ([], [9, 9, 9, 9, 9, 9], [8, 8, 8])
words = st.lists(st.integers(1, 2), min_size=2, max_size=11)
names = st.sampled_from(NAMES)
memories = st.sampled_from([150, 600, 5000])
disks = st.sampled_from([0, 12_000, 40_000, 1_000_000])
shares = st.sampled_from([None, None, 12_000])


class AgentLives(RuleBasedStateMachine):
    """See the module."""

    @initialize(spec=st.sampled_from(sorted(SPECS)), memory=memories, disk=disks, share=shares)
    def start(self, spec: str, memory: int, disk: int, share: int | None) -> None:
        limits = RigLimits(memory, DiskLimits(disk, 400, lambda _: share))
        self.rig = MemoryRig(spec=SPECS[spec], limits=limits)
        self.said: dict[str, list[int]] = {}
        self.turns: dict[str, list[tuple[str, int]]] = {}
        self.plans: dict[str, tuple[AgentCacheStore, int, list[int], RestorePlan]] = {}
        self.reserved = self.used = 0

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()

    # -- agents ---------------------------------------------------------------------------------

    @rule(name=names, system=st.sampled_from(SYSTEMS), asked=words)
    def talk(self, name: str, system: list[int], asked: list[int]) -> None:
        before = self.said.get(name, system)
        tokens = [*before, *asked]
        head = len(system) if before[: len(system)] == system else 0
        turn = self.rig.talk(name, tokens, boundaries=(head, len(tokens) - 1) if head else ())
        self.said[name] = tokens
        self.turns.setdefault(name, []).append((turn.id, len(tokens)))
        self.rig.now[0] += 1

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.said)))
        free = [name for name in NAMES if name not in self.said]
        if free:
            self.rig.agents.fork(LOCAL_TENANT, source, [free[0]])
            self.said[free[0]] = self.said[source]
            self.turns[free[0]] = list(self.turns[source])

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        index = data.draw(st.integers(0, len(self.turns[name]) - 1))
        turn_id, length = self.turns[name][index]
        self.rig.agents.rewind(LOCAL_TENANT, name, turn_id)
        self.said[name] = self.said[name][:length]
        self.turns[name] = self.turns[name][: index + 1]

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        self.rig.agents.delete(LOCAL_TENANT, name)
        del self.said[name], self.turns[name]

    # -- tiers ----------------------------------------------------------------------------------

    @precondition(lambda self: self.said)
    @rule(data=st.data(), is_cold=st.booleans())
    def evict(self, data: st.DataObject, is_cold: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        agent = self.rig.agents.get(LOCAL_TENANT, name)
        self.rig.upkeep.evict(agent, is_cold=is_cold)
        if is_cold and not any(other != name for other in self.said):
            assert self.rig.upkeep.footprint(agent).disk_tokens == 0

    @rule()
    def forget_memory(self) -> None:
        nodes = self.rig.store.nodes()
        self.rig.store.drop_payloads(WantedPart(node, kind) for node in nodes for kind in LayerKind)

    @rule(nbytes=st.integers(0, 600))
    def take_memory(self, nbytes: int) -> None:
        self.rig.store.unreserve(self.reserved)
        self.reserved = 0
        try:
            self.rig.store.reserve(nbytes)
            self.reserved = nbytes
        except PoolExhaustedError:
            assert nbytes > self.rig.limits.memory - self.rig.store.usage().held

    @rule(memory=memories, disk=disks, share=shares, is_crash=st.booleans())
    def restart(self, memory: int, disk: int, share: int | None, is_crash: bool) -> None:
        if is_crash:  # between files and rows
            self.rig.flush()
            self.rig.ledger.index.lose_index()
        self.rig.restart(RigLimits(memory, DiskLimits(disk, 400, lambda _: share)))
        self.reserved = 0
        self.rig.upkeep.refresh_pins()
        if is_crash:
            self.rig.upkeep.reconcile()
        self.rig.upkeep.warm_up()

    # -- the disk -------------------------------------------------------------------------------

    @precondition(lambda self: self.rig.files.files)
    @rule(data=st.data(), how=st.sampled_from(["spoil", "delete", "swap"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        files = self.rig.files.files
        keys = st.sampled_from(sorted(files, key=lambda key: (key[0], key[1].value)))
        one, other = data.draw(keys), data.draw(keys)
        if how == "spoil":
            self.rig.files.bad.add(one)
        elif how == "delete":
            del files[one]
        else:
            files[one], files[other] = files[other], files[one]

    @rule()
    def fill_or_empty_disk(self) -> None:
        self.rig.files.is_full = not self.rig.files.is_full

    @rule(age=st.sampled_from([0.0, 5.0, 100.0]))
    def collect(self, age: float) -> None:
        self.rig.now[0] += 61
        self.rig.upkeep.collect(orphan_age_s=age)

    @rule()
    def tick(self) -> None:
        self.rig.now[0] += 61
        self.rig.upkeep.tick()

    @rule()
    def verify(self) -> None:
        list(self.rig.upkeep.verify())
        self.rig.flush()
        assert not self.rig.files.bad & set(self.rig.ledger.parts)

    @precondition(lambda self: self.said)
    @rule(data=st.data(), asked=words)
    def pins_hold(self, data: st.DataObject, asked: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        agent = self.rig.agents.get(LOCAL_TENANT, name)
        self.rig.flush()
        self.rig.pin(name)
        turn = self.rig.agents.turn(LOCAL_TENANT, agent.head or "")
        block = turn.pointer.block if turn and turn.pointer else ROOT
        chain = self.rig.store.chain(block)
        pinned = [(node, kind) for node in chain for kind in node.files]
        self.rig.seal([7, *asked])
        self.rig.flush()
        for node, kind in pinned:
            assert kind in node.files, "a pinned file went"
        self.rig.pin(name, is_pinned=False)
        assert not any(node.num_pins for node in self.rig.store.nodes())

    @precondition(lambda self: self.said)
    @rule(data=st.data(), asked=words)
    def leases_hold(self, data: st.DataObject, asked: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        tokens = self.said[name]
        self.rig.flush()
        files = self.rig.files
        plan = self.rig.store.plan(ROOT, tokens[:-1])
        files.gate.clear()
        reads = [
            held for wanted in plan.parts[:2] if (held := self.rig.store.tiers.acquire(wanted))
        ]
        sound = {key for key, (part, _) in files.files.items() if key == part.key} - files.bad
        self.rig.agents.delete(LOCAL_TENANT, name)
        self.rig.now[0] += 1000
        self.rig.upkeep.collect(orphan_age_s=0)
        self.rig.seal([7, *asked])
        self.rig.flush()
        files.gate.set()
        for held in reads:
            is_sound = held.wanted.key in sound
            assert held.future.exception(60) is None or not is_sound, "a leased file went"
            self.rig.store.tiers.release(held)
        del self.said[name], self.turns[name]

    # -- always ---------------------------------------------------------------------------------

    @invariant()
    def holds_together(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.settle()
        rig.store.check_integrity()
        assert rig.disk.queued_bytes == 0
        # A start with a smaller budget finds more; nothing is added then.
        used, before = rig.files.used_bytes(), self.used
        assert used <= max(rig.limits.disk.budget_bytes, before), "the disk's budget is exceeded"
        self.used = used
        known = {part.key for node in rig.store.nodes() for part in node.files.values()}
        assert known == set(rig.ledger.parts), "index and ledger differ"
        for name, tokens in self.said.items():
            agent = rig.agents.get(LOCAL_TENANT, name)
            assert rig.agents.tokens(agent) == tokens, "a conversation was lost"

    @invariant()
    def a_plan_holds_as_long_as_the_version_does(self) -> None:
        if not hasattr(self, "rig"):
            return
        store = self.rig.store
        for name, tokens in self.said.items():
            version = store.version
            plan = store.plan(ROOT, tokens, is_used=False)
            if store.version == version and name in self.plans:
                *basis, known = self.plans[name]
                is_same = basis == [store, version, tokens]
                assert plan == known or not is_same, "a plan changed and the version did not"
            self.plans[name] = (store, version, tokens, plan)


TestAgentLives = AgentLives.TestCase
TestAgentLives.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
