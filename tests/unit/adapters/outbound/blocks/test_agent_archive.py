import contextlib
import hashlib
import hmac
import json
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.blocks.agent_archive import (
    AgentFile,
    ExportKeys,
    compose_manifest,
    own_key,
)
from semantic.adapters.outbound.blocks.archive import END, compose_member
from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.domain.agents import Agent, AgentProfile, Pointer, Reuse, Turn
from semantic.domain.blocks import BlockName, BlockPart, block_name, pack_tokens
from semantic.domain.chat import Message, Role
from semantic.domain.errors import CachePersistenceError, InvalidRequestError
from semantic.domain.events import Usage
from semantic.domain.sampling import FinishReason
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload
from semantic.ports.storage import ExportHead, ExportImage, ExportItem, ExportPart
from tests.agent_files import changed, members, packed, with_member_fields

pytestmark = pytest.mark.unit

ROOT = BlockName(bytes(32))
NAME = block_name(ROOT, [1, 2, 3])
HEAD = ExportHead(
    Agent("a", 1.5, head="t1", num_turns=1, profile=AgentProfile("s")), "m", "f", "abi"
)
TURN = Turn(
    id="t1",
    parent=None,
    agent_id="",
    messages=(Message.of(Role.USER, "ä"),),
    tokens=(1, 2, 3),
    num_tokens=3,
    pointer=Pointer(ROOT, NAME, 3),
    usage=Usage(3),
    created_at=2.5,
    reuse=Reuse(hot=1),
    num_messages=1,
    digest="d",
    num_dropped=2,
    model="m",
    reason=FinishReason.MAX_TOKENS,
)


def part(kind: LayerKind) -> ExportPart:
    data = bytes(range(24))
    payload = KVPayload("abi", kind, 0, 3, (HostBuffer("full", (3, 2), "float32", data),))
    return ExportPart(BlockPart(ROOT, NAME, ROOT, kind, 0, pack_tokens([1, 2, 3])), payload)


ITEMS: list[ExportItem] = [HEAD, TURN, part(LayerKind.FULL), part(LayerKind.STATE)]
FILE = AgentFile(KVCodec(), ExportKeys(b"own", {"laptop": b"theirs"}))
CONTENT = b"".join(FILE.write(ITEMS))


def read(content: bytes, size: int = 1000) -> list[ExportItem]:
    FILE.check(pieces_of(content, size))
    return list(FILE.read(pieces_of(content, size), has_parts=True))


def pieces_of(content: bytes, size: int = 1000) -> Iterator[bytes]:
    return (content[i : i + size] for i in range(0, len(content), size))


def signer(content: bytes) -> str:
    return FILE.check(pieces_of(content))


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_a_written_archive_is_read_back(size: int) -> None:
    head, turn, *parts = read(CONTENT, size)

    assert (head, turn) == (HEAD, TURN)
    for found, expected in zip(parts, ITEMS[2:], strict=True):
        assert isinstance(found, ExportPart)
        assert isinstance(expected, ExportPart)
        assert found.part.name == expected.part.name
        assert found.part.kind is expected.part.kind
        assert bytes(found.payload.buffers[0].data) == bytes(expected.payload.buffers[0].data)


def test_images_stand_between_turns_and_blocks() -> None:
    image = ExportImage(hashlib.sha256(b"png").hexdigest(), b"png")
    content = b"".join(FILE.write([HEAD, TURN, image, part(LayerKind.FULL)]))

    head, turn, found, _ = read(content)

    assert (head, turn, found) == (HEAD, TURN, image)
    assert members(content)[2] == (f"images/{image.digest}", b"png")


def test_every_tool_can_list_it() -> None:
    block = f"blocks/{NAME.hex()}"

    assert [name for name, _ in members(CONTENT)] == [
        "agent.json",
        "turns/000001.json",
        f"{block}.full.safetensors",
        f"{block}.state.safetensors",
        "manifest.json",
    ]
    assert CONTENT[257:265] == b"ustar\x0000"
    assert CONTENT.endswith(END)
    assert json.loads(members(CONTENT)[0][1])["body"]["created_at"] == HEAD.agent.created_at


def test_what_a_tool_packed_anew_is_the_same_file() -> None:
    again = packed(members(CONTENT))

    assert again != CONTENT  # tools fill up the last record
    assert signer(again) == "this server"
    assert read(again)[:2] == [HEAD, TURN]


@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_any_byte_that_changes_is_noticed(place: int, change: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[place] ^= change
    signature = CONTENT.rindex(b'"hmac"') + len(b'"hmac": "')
    if signature <= place < signature + 64 and 0x20 <= damaged[place] < 0x7F:
        # With another signature it is a stranger's, and otherwise whole.
        with contextlib.suppress(InvalidRequestError):
            assert signer(bytes(damaged)) == ""
        return

    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        read(bytes(damaged))


@given(st.integers(0, len(CONTENT) - 1))
def test_a_file_that_is_cut_off_is_noticed(length: int) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        read(CONTENT[:length])


@given(st.binary(max_size=2000))
def test_nonsense_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read(content)
    with pytest.raises(InvalidRequestError):
        read(CONTENT + content + b"x")


def test_a_file_of_the_former_format_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="an earlier version of Semantic wrote it"):
        read(b'semantic-agent/1\n{"kind": "agent", "nbytes": 2, "sha256": ""}\n{}')


# -- other archives ---------------------------------------------------------------------------

Files = list[tuple[str, bytes]]


def repacked(edit: Callable[[Files], Files]) -> bytes:
    """The archive with other members, and a manifest that is right for them."""
    return packed(edit(members(CONTENT)[:-1]), "0" * 64)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m[1:],
        lambda m: [m[1], m[0], *m[2:]],
        lambda m: [m[0], m[2], m[1], m[3]],
        lambda m: [m[0], *m],
        lambda m: [*m, m[3]],
        lambda m: [m[0], ("turns/000002.json", m[1][1]), *m[2:]],
        lambda m: [*m[:2], m[1], *m[2:]],
        lambda m: [*m[:2], ("turns/0000002.json", m[1][1])],
        lambda m: [("./agent.json", m[0][1]), *m[1:]],
        lambda m: [*m, ("blocks/../../escape", b"")],
        lambda m: [*m, ("/etc/passwd", b"")],
        lambda m: [*m[:2], (f"images/{'0' * 64}", b"another file"), *m[2:]],
        lambda m: [*m, (f"images/{hashlib.sha256(b'x').hexdigest()}", b"x")],
        lambda m: [*m[:2], ("images/x.png", b"x"), *m[2:]],
        lambda m: [*m, ("blocks/" + "0" * 64 + ".other.safetensors", b"")],
        lambda m: [*m[:2], (m[3][0], m[2][1])],
        lambda _: [],
    ],
)
def test_other_members_and_other_orders_are_refused(edit: Callable[[Files], Files]) -> None:
    assert signer(repacked(lambda m: m)) == ""

    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        read(repacked(edit))


def member_header(**fields: Any) -> bytes:
    header = tarfile.TarInfo("agent.json")
    for name, value in fields.items():
        setattr(header, name, value)
    return header.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "fields",
    [
        *({"type": kind} for kind in (b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"L", b"x")),
        {"type": b"g"},
        {"type": b"\0"},
        {"linkname": "/etc/passwd"},
        {"size": -1},
        {"size": 2**30},
        {"size": 2**70},
        {"name": "agent.json/"},
        {"name": "a" * 200},
    ],
)
def test_what_is_no_plain_file_is_refused(fields: dict[str, Any]) -> None:
    size = len(members(CONTENT)[0][1])
    assert read(member_header(size=size) + CONTENT[512:])[0] == HEAD

    with pytest.raises(InvalidRequestError, match=r"that agents do not have|is too long"):
        read(member_header(**fields) + CONTENT[512:] + bytes(2**20))


def test_a_manifest_must_be_right() -> None:
    *files, (name, manifest) = members(CONTENT)
    stored = json.loads(manifest)
    wrong_manifests: list[Any] = [{}, [], stored | {"format": "x"}, stored | {"sha256": {}}]
    for wrong in wrong_manifests:
        with pytest.raises(InvalidRequestError, match="manifest"):
            signer(packed([*files, (name, json.dumps(wrong, indent=1).encode() + b"\n")]))
    with pytest.raises(InvalidRequestError, match="manifest"):
        signer(packed([*files[:3], (name, manifest)]))
    with pytest.raises(InvalidRequestError, match="follows its manifest"):
        signer(packed([*files, (name, manifest), files[0]]))


# -- signatures -------------------------------------------------------------------------------


def test_a_file_names_its_signer() -> None:
    def written(key: bytes) -> bytes:
        return b"".join(AgentFile(KVCodec(), ExportKeys(key)).write(ITEMS))

    assert signer(CONTENT) == "this server"
    assert signer(written(b"theirs")) == "laptop"
    assert signer(written(b"a stranger's")) == ""


@pytest.mark.parametrize("kind", ["agent", "turn", "block"])
def test_a_file_that_was_changed_is_not_signed(kind: str) -> None:
    assert signer(changed(CONTENT, lambda _, content: content)) == "this server"

    def edit(found: str, content: bytes) -> bytes:
        return content + b" " if found == kind else content

    assert signer(changed(CONTENT, edit)) == ""


def test_the_signature_is_of_what_sha256sum_prints() -> None:
    *files, (_, manifest) = members(CONTENT)
    lines = [f"{hashlib.sha256(body).hexdigest()}  {name}\n" for name, body in files]
    text = f"semantic-agent/2\n{''.join(lines)}".encode()

    assert json.loads(manifest)["hmac"] == hmac.new(b"own", text, "sha256").hexdigest()


def test_parts_are_passed_over_where_they_are_not_wanted() -> None:
    spoilt = changed(CONTENT, lambda kind, content: b"x" if kind == "block" else content)

    assert list(FILE.read(pieces_of(spoilt), has_parts=False)) == [HEAD, TURN]
    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        list(FILE.read(pieces_of(spoilt), has_parts=True))


# -- a stranger's fields ----------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("agent", {"id": 1}),
    ("agent", {"id": "a b"}),
    ("agent", {"model": None}),
    ("agent", {"fingerprint": "f" * 2000}),
    ("agent", {"body": {}}),
    ("agent", {"body": "[]"}),
    ("turn", {"num_tokens": 2**70}),
    ("turn", {"num_tokens": -1}),
    ("turn", {"num_tokens": "3"}),
    ("turn", {"created_at": float("nan")}),
    ("turn", {"created_at": "1"}),
    ("turn", {"created_at": None}),
    ("turn", {"tokens": "aa"}),
    ("turn", {"tokens": "zz" * 4}),
    ("turn", {"parent": 7}),
    ("turn", {"id": "\ud800"}),
    ("turn", {"pointer": ["", "", 1]}),
    ("turn", {"pointer": ["00" * 32, "00" * 32, 2**70]}),
    ("turn", {"pointer": ["00" * 32]}),
    ("turn", {"body": "null"}),
]


@pytest.mark.parametrize("kind,fields", WRONG)
def test_a_field_that_makes_no_sense_is_refused(kind: str, fields: dict[str, Any]) -> None:
    spoilt = changed(CONTENT, with_member_fields(kind, **fields))
    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        read(spoilt)


# -- keys -------------------------------------------------------------------------------------


def test_concurrent_first_starts_create_one_key(tmp_path: Path) -> None:
    path = tmp_path / "home" / "export.key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: own_key(path), range(8)))

    assert keys == {own_key(path)}
    assert [found.name for found in path.parent.iterdir()] == ["export.key"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"0" * 65, b"G" * 64])
def test_what_is_no_key_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "export.key"
    path.write_bytes(content)

    with pytest.raises(CachePersistenceError, match=r"export\.key"):
        own_key(path)

    assert path.read_bytes() == content


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ExportKeys(b"secret", {"laptop": b"secret too"}))


@pytest.mark.parametrize("signature", ["", "00", "ä" * 64])
def test_an_invalid_signature_has_no_signer(signature: str) -> None:
    assert ExportKeys(b"secret").signer(b"content", signature) == ""


# -- files that cost more than they are worth ------------------------------------------------------

AGENT_MEMBER = members(CONTENT)[0]
BLOCK_MEMBER = f"blocks/{'0' * 64}.full.safetensors"


def test_a_large_block_is_checked_and_passed_over_in_little_memory() -> None:
    num_bytes = 2**25
    digests = {
        AGENT_MEMBER[0]: hashlib.sha256(AGENT_MEMBER[1]).hexdigest(),
        BLOCK_MEMBER: hashlib.sha256(bytes(num_bytes)).hexdigest(),
    }
    header = next(compose_member(BLOCK_MEMBER, [bytes(num_bytes)]))

    def pieces() -> Iterator[bytes]:
        yield from compose_member(AGENT_MEMBER[0], [AGENT_MEMBER[1]])
        yield header
        for _ in range(num_bytes >> 16):
            yield bytes(2**16)
        yield from compose_member("manifest.json", [compose_manifest(digests, "none")])
        yield END

    tracemalloc.start()
    try:
        assert FILE.check(pieces()) == ""
        assert list(FILE.read(pieces(), has_parts=False)) == [HEAD]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num_bytes / 8


def turn_of(content: bytes, number: int = 1) -> Iterator[bytes]:
    return compose_member(f"turns/{number:06}.json", [content])


def too_long() -> Iterator[bytes]:
    yield from turn_of(bytes(2**25 + 1))


def too_long_together() -> Iterator[bytes]:
    for number in range(1, 6):
        yield from turn_of(bytes(2**25), number)


def too_many() -> Iterator[bytes]:
    digest = bytes(32).hex()
    for number in range(2**16 + 1):
        yield from compose_member(f"blocks/{digest[:-6]}{number:06}.full.safetensors", [])


def too_many_values() -> Iterator[bytes]:
    yield from turn_of(b"[" + b"[]," * 1_100_000 + b"1]")


@pytest.mark.parametrize(
    "made, problem",
    [
        (too_long, "is too long"),
        (too_long_together, "its JSON members exceed 128 MB"),
        (too_many, "more than 65536 members"),
        (too_many_values, "too many values"),
    ],
)
def test_a_file_that_would_take_too_much_memory_is_refused(
    made: Callable[[], Iterator[bytes]], problem: str
) -> None:
    def pieces() -> Iterator[bytes]:
        yield from compose_member(AGENT_MEMBER[0], [AGENT_MEMBER[1]])
        yield from made()

    def read_all() -> None:
        if made is not too_many_values:
            FILE.check(pieces())
        for _ in FILE.read(pieces(), has_parts=False):
            pass

    with pytest.raises(InvalidRequestError, match=problem):
        read_all()
