"""Blocks that several machines share: an object store, the index in PostgreSQL, the collector."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantic.adapters.outbound.backends.fake import fake_spec
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.cache.restore_plan import RestorePlan, WantedPart, worth_reading
from semantic.application.cache.store import AgentCacheStore
from semantic.application.cache.writer import DiskLimits, DiskTier
from semantic.cluster.application.object_tier import ObjectTier
from semantic.cluster.ports import ObjectsPort
from semantic.domain.blocks import BlockName, BlockPart, PartKey, block_name, pack_tokens
from semantic.domain.errors import CacheCorruptionError, InvalidRequestError
from semantic.domain.pool import BlockPool
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload
from semantic.ports.storage import PutAgent, PutTurn
from tests.http_server import make_settings, run_server
from tests.postgres import new_schema, num_shared_parts
from tests.unit.adapters.outbound.ledger.ledger_values import ROOT, agent_of, turn_of
from tests.waiting import await_that

pytest.importorskip("psycopg")
pytest.importorskip("obstore")
from semantic.cluster.adapters.objects import ObjectBlocks, open_store
from semantic.cluster.adapters.postgres import PostgresLedger
from semantic.cluster.adapters.shared_parts import SharedParts

pytestmark = pytest.mark.integration

BLOCK = 8


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server with a bucket; yields its address."""
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    httpx.put(f"{address}/blocks", trust_env=False).raise_for_status()
    yield address
    server.stop()


@pytest.fixture(params=["memory", "local", "s3"])
def objects(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ObjectBlocks:
    if request.param == "memory":
        return ObjectBlocks(open_store("memory:"))
    if request.param == "local":
        return ObjectBlocks(open_store((tmp_path / "objects").as_uri()))
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
    for name, value in (
        ("ACCESS_KEY_ID", "k"),
        ("SECRET_ACCESS_KEY", "s"),
        ("REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return ObjectBlocks(open_store(f"s3://blocks/{tmp_path.name}"))


@pytest.fixture
def ledger(database_url: str) -> Iterator[PostgresLedger]:
    made = PostgresLedger(database_url, SqliteLedger(None))
    made.load()
    yield made
    made.close()


class Machine:
    """A server's store with its own directory, before the tier that it shares."""

    def __init__(self, directory: Path, objects: ObjectsPort, ledger: PostgresLedger) -> None:
        own = SqliteLedger(directory)
        own.load()
        files = SafetensorsCache(directory)
        self.disk = DiskTier(files, own, DiskLimits(2**30, 2**30))
        self.shared = ObjectTier(files, objects, SharedParts(ledger))
        pool = BlockPool(fake_spec(block_tokens=BLOCK), 2**24)
        self.store = AgentCacheStore(pool, self.disk, shared=self.shared)
        self.disk.start(self.store.is_on_disk)

    def seal(self, tokens: list[int]) -> None:
        parent = ROOT
        for start in range(0, len(tokens), BLOCK):
            block = tokens[start : start + BLOCK]
            name = self.store.seal(ROOT, parent, block, [payload_of(block, start)])
            assert name is not None
            parent = name

    def recall(self, tokens: list[int]) -> list[bytes]:
        """What can be restored of a prompt, from wherever it is."""
        self.store.learn(ROOT, tokens)
        plan = self.store.plan(ROOT, tokens)
        held = [self.store.tiers.acquire(wanted) for wanted in plan.parts]
        content = [bytes(part.future.result(60).buffers[0].data) for part in held if part]
        for part in held:
            assert part is not None
            self.store.tiers.release(part)
        return content

    def num_worth_reading(self, plan: RestorePlan, seconds_per_token: float) -> int:
        costs = self.store.read_costs
        return worth_reading(plan, ROOT, self.store.spec, costs, seconds_per_token).end

    def close(self) -> None:
        self.store.check_integrity()
        self.shared.close(60)
        assert self.disk.close(60)


Start = Callable[..., Machine]


@pytest.fixture
def start(ledger: PostgresLedger, tmp_path: Path) -> Iterator[Start]:
    """Starts machines by name; all end with the test."""
    with ExitStack() as stack:

        def make(name: str, objects: ObjectsPort) -> Machine:
            made = Machine(tmp_path / name, objects, ledger)
            stack.callback(made.close)
            return made

        yield make


def payload_of(tokens: list[int], start: int) -> KVPayload:
    data = pack_tokens([token * 7 + start for token in tokens])
    buffer = HostBuffer("full", (len(tokens),), "u32", data)
    return KVPayload("fake.v1", LayerKind.FULL, start, start + len(tokens), (buffer,))


def part_of(tokens: list[int], parent: BlockName = ROOT, start: int = 0) -> BlockPart:
    packed = pack_tokens(tokens)
    name = block_name(parent, tokens)
    return BlockPart(ROOT, name, parent, LayerKind.FULL, start, packed, 0, 0.0)


# -- objects ------------------------------------------------------------------------------------


def test_an_object_is_written_once_read_listed_and_deleted(objects: ObjectBlocks) -> None:
    key = part_of([1, 2]).key
    objects.put(key, memoryview(b"first"))
    objects.put(key, memoryview(b"second"))  # what is there stays

    assert bytes(objects.get(key)) == b"first"
    assert [found for page in objects.older_than(0) for found in page] == [key]
    assert [found for page in objects.older_than(3600) for found in page] == []
    for _ in range(2):
        objects.delete(key)
    with pytest.raises(CacheCorruptionError):
        objects.get(key)


def test_a_url_that_names_no_store_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="object store"):
        open_store("ftp://somewhere/else")


# -- two machines -------------------------------------------------------------------------------


def test_a_second_machine_restores_what_the_first_wrote_byte_for_byte(
    start: Start, objects: ObjectBlocks, ledger: PostgresLedger, tmp_path: Path
) -> None:
    tokens = list(range(3 * BLOCK + 5))
    one = start("one", objects)
    one.seal(tokens)
    await_that(lambda: len(SharedParts(ledger).follow(ROOT, pack_tokens(tokens))) == 4)
    two = start("two", objects)

    expected = [
        bytes(payload_of(tokens[i : i + BLOCK], i).buffers[0].data)
        for i in range(0, len(tokens), BLOCK)
    ]
    assert two.recall(tokens) == expected
    assert two.disk.flush(60)

    # It has copies of its own now, the same bytes, and no longer needs the store.
    for part in SharedParts(ledger).follow(ROOT, pack_tokens(tokens)):
        objects.delete(part.key)
    files = [
        sorted(p.read_bytes() for p in (tmp_path / n).rglob("*.safetensors"))
        for n in ("one", "two")
    ]
    assert files[0] == files[1]
    two.store.drop_memory()
    assert two.recall(tokens) == expected


def test_what_diverges_inside_of_a_block_is_found_too(start: Start, ledger: PostgresLedger) -> None:
    objects = ObjectBlocks(open_store("memory:"))
    one, two = (start(name, objects) for name in ("one", "two"))
    one.seal(list(range(2 * BLOCK)))
    await_that(lambda: len(SharedParts(ledger).follow(ROOT, pack_tokens(range(16)))) == 2)

    other = [*range(BLOCK + 3), *range(100, 100 + 2 * BLOCK)]
    two.store.learn(ROOT, other)
    assert two.store.plan(ROOT, other).end == BLOCK + 3
    stranger = [50, *other]
    assert SharedParts(ledger).follow(ROOT, pack_tokens(stranger)) == []


class SlowObjects(ObjectBlocks):
    """A store at the end of a slow link."""

    def get(self, key: PartKey) -> memoryview:
        time.sleep(0.05)
        return super().get(key)


def test_what_a_slow_link_would_bring_is_computed(start: Start, ledger: PostgresLedger) -> None:
    objects = SlowObjects(open_store("memory:"))
    tokens = list(range(2 * BLOCK))
    one, two = (start(name, objects) for name in ("one", "two"))
    for beginning in (0, 1000):
        one.seal([beginning + token for token in tokens])
    await_that(
        lambda: len(SharedParts(ledger).follow(ROOT, pack_tokens([1000 + t for t in tokens]))) == 2
    )
    two.recall([1000 + token for token in tokens])  # measures the link

    two.store.learn(ROOT, tokens)
    plan = two.store.plan(ROOT, tokens)
    assert plan.end == 2 * BLOCK
    assert two.num_worth_reading(plan, 10.0) == 2 * BLOCK
    assert two.num_worth_reading(plan, 1e-6) == 0
    # What is in memory stays in the plan, and only what is far away is computed.
    near = two.store.plan(ROOT, [1000 + token for token in tokens])
    assert two.num_worth_reading(near, 1e-6) == 2 * BLOCK


def test_an_object_that_is_gone_or_bad_is_a_miss_and_is_written_again(
    start: Start, ledger: PostgresLedger
) -> None:
    objects, index = ObjectBlocks(open_store("memory:")), SharedParts(ledger)
    tokens = list(range(BLOCK))
    part = part_of(tokens)
    one, two = (start(name, objects) for name in ("one", "two"))
    one.seal(tokens)
    await_that(lambda: index.revive(part.key))
    objects.delete(part.key)
    two.store.learn(ROOT, tokens)
    (wanted,) = two.store.plan(ROOT, tokens).parts
    assert wanted == WantedPart(wanted.node, LayerKind.FULL)
    held = two.store.tiers.acquire(wanted)
    assert held is not None
    with pytest.raises(CacheCorruptionError):
        held.future.result(60)
    two.store.tiers.release(held)
    assert two.store.plan(ROOT, tokens).end == 0
    assert index.revive(part.key) is False
    # After the collector ran, the server that computed it writes it again.
    index.forget(grace_s=0)
    two.seal(tokens)
    await_that(lambda: index.revive(part.key))
    assert objects.get(part.key)


# -- the collector ------------------------------------------------------------------------------


@pytest.fixture
def tier(ledger: PostgresLedger, tmp_path: Path) -> ObjectTier:
    files, objects = SafetensorsCache(tmp_path), ObjectBlocks(open_store("memory:"))
    return ObjectTier(files, objects, SharedParts(ledger), grace_s=3600)


def publish(tier: ObjectTier, directory: Path, tokens: list[int]) -> BlockPart:
    written = SafetensorsCache(directory).write(
        part_of(tokens), payload_of(tokens, 0), is_synced=False
    )
    assert tier.publish(written)
    return written


def test_a_writer_that_dies_between_upload_and_row_leaves_nothing_wrong(
    tier: ObjectTier, ledger: PostgresLedger, tmp_path: Path
) -> None:
    part = SafetensorsCache(tmp_path).write(
        part_of([1] * BLOCK), payload_of([1] * BLOCK, 0), is_synced=False
    )
    steps = tier.steps(part)
    assert next(steps)
    assert next(steps)
    del steps
    assert SharedParts(ledger).follow(ROOT, part.tokens) == []  # it is not offered
    assert tier.publish(part)
    assert SharedParts(ledger).follow(ROOT, part.tokens)


def age(ledger: PostgresLedger, hours: int = 2) -> None:
    """Let time pass, as the database sees it."""
    query = """UPDATE parts SET used_at = used_at - make_interval(hours => %(hours)s),
        dead_since = dead_since - make_interval(hours => %(hours)s),
        deleted_at = deleted_at - make_interval(hours => %(hours)s)"""
    with ledger.transaction() as connection:
        connection.execute(query, {"hours": hours})


def test_what_an_agent_reaches_stays_and_the_rest_goes_after_a_grace(
    tier: ObjectTier, ledger: PostgresLedger, tmp_path: Path
) -> None:
    index = SharedParts(ledger)
    kept, lost = (publish(tier, tmp_path, [n] * BLOCK) for n in (1, 2))
    turn = turn_of("t1", block=kept.name)
    ledger.apply([PutTurn("local", turn), PutAgent(agent_of("coder", "t1"))], is_synced=False)
    fleeting = replace(agent_of("fleeting", "t1"), ttl_s=-1.0)
    ledger.apply([PutAgent(fleeting)], is_synced=False)

    assert tier.collect(unused_s=3600) == 0  # used just now
    assert ledger.agent("local", "fleeting") is None
    age(ledger)
    assert tier.collect(unused_s=3600) == 0  # dead, and in its grace
    age(ledger)
    with index.sole_collector() as is_sole:
        assert is_sole
        assert tier.collect(unused_s=3600) == 0  # another collects
    assert tier.collect(unused_s=3600) == lost.nbytes
    assert index.revive(kept.key) is True
    assert index.revive(lost.key) is False  # it cannot be revived yet
    age(ledger)
    tier.collect(unused_s=3600)
    assert index.revive(lost.key) is None
    assert tier.publish(lost)


def test_a_dead_part_that_is_sealed_again_lives(
    tier: ObjectTier, ledger: PostgresLedger, tmp_path: Path
) -> None:
    part = publish(tier, tmp_path, [1] * BLOCK)
    age(ledger)
    tier.collect(unused_s=3600)
    assert tier.publish(part)
    age(ledger, hours=0)
    assert tier.collect(unused_s=3600) == 0
    assert SharedParts(ledger).follow(ROOT, part.tokens) == [replace(part, last_used=0.0)]


@pytest.mark.slow
def test_a_real_models_state_goes_on_at_a_second_server_as_if_computed_there(
    tiny_starter_dir: Path, postgres_server: str, tmp_path: Path
) -> None:
    """Two servers share a store; a third has one of its own and computes everything."""
    shared, own = new_schema(postgres_server), new_schema(postgres_server)
    places = {"one": (shared, "both"), "two": (shared, "both"), "fresh": (own, "fresh")}
    with ExitStack() as stack:
        servers = {}
        for name, (database_url, objects) in places.items():
            options: dict[str, Any] = {"model": str(tiny_starter_dir), "backend": "torch"}
            options |= {"dtype": "float32", "store": "shared"}
            options |= {"database_url": database_url}
            options["objects_url"] = (tmp_path / objects).as_uri()
            made = make_settings(tmp_path / name, **options)
            server = stack.enter_context(run_server(made))
            servers[name] = stack.enter_context(server.client())
        opening = {name: _say(servers[name], "coder", _LONG) for name in ("one", "fresh")}
        await_that(
            lambda: num_shared_parts(shared) >= opening["one"]["usage"]["prompt_tokens"] // 256
        )
        replies = {name: _say(servers[name], "coder", "And now?") for name in ("two", "fresh")}
    assert opening["one"]["text"] == opening["fresh"]["text"]
    assert replies["two"]["reuse"]["disk"] >= 256
    assert replies["fresh"]["reuse"]["disk"] == 0
    assert replies["two"]["text"] == replies["fresh"]["text"]


_LONG = "The quick brown fox jumps over the lazy dog. " * 40


def _say(http: httpx.Client, agent: str, text: str) -> dict[str, Any]:
    http.post("/v1/agents", json={"id": agent})
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0}
    reply = http.post(f"/v1/agents/{agent}/generate", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


# Each step names what runs next: a writer, the collector, time, or a crash of one of them.
_STEPS = st.lists(st.sampled_from(["one", "two", "collect", "age", "kill"]), max_size=24)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_STEPS)
def test_whatever_the_order_what_the_index_has_is_in_the_store(
    database_url: str, tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """Two writers of one block and a collector, step by step, any of which may die anywhere."""
    with ExitStack() as stack:
        ledger = PostgresLedger(database_url, SqliteLedger(None))
        ledger.load()
        stack.callback(ledger.close)
        with ledger.transaction() as connection:
            connection.execute("DELETE FROM parts")
        objects, index = ObjectBlocks(open_store("memory:")), SharedParts(ledger)
        directory = tmp_path_factory.mktemp("files")
        # Writers stop after half a grace, so time that passes here must end theirs.
        tier = ObjectTier(SafetensorsCache(directory), objects, index, grace_s=3600)
        part = SafetensorsCache(directory).write(
            part_of([1] * BLOCK), payload_of([1] * BLOCK, 0), is_synced=False
        )
        running: dict[str, Iterator[object]] = {}
        for step in steps:
            if step == "age":
                age(ledger)
                running.pop("one", None), running.pop("two", None)
            elif step == "kill":
                running.clear()
            else:
                works = {"collect": lambda: tier.collection(unused_s=3600)}
                work = running.get(step) or works.get(step, lambda: tier.steps(part))()
                running[step] = work
                if next(work, False) is False:
                    del running[step]
            if _is_live(ledger, part):
                assert objects.get(part.key)


def _is_live(ledger: PostgresLedger, part: BlockPart) -> bool:
    """Whether the index has a part; looking does not revive it."""
    query = "SELECT 1 FROM parts WHERE name = %s AND deleted_at IS NULL"
    with ledger.transaction() as connection:
        return connection.execute(query, (part.name,)).fetchone() is not None
