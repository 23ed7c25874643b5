import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.blocks.agent_archive import MAGIC, AgentFile
from semantic.adapters.outbound.blocks.export_keys import ExportKeys
from semantic.adapters.outbound.blocks.kv_codec import KVCodec
from semantic.domain.agents import Agent, AgentProfile, Pointer, Reuse, Turn
from semantic.domain.blocks import BlockName, BlockPart, block_name, pack_tokens
from semantic.domain.chat import Message, Role, Usage
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import FinishReason
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload
from semantic.ports.storage import ExportHead, ExportItem, ExportPart
from tests.agent_frames import changed, with_fields, with_frame_fields

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
def test_what_was_written_is_read(size: int) -> None:
    head, turn, *parts = read(CONTENT, size)

    assert (head, turn) == (HEAD, TURN)
    for found, expected in zip(parts, ITEMS[2:], strict=True):
        assert isinstance(found, ExportPart)
        assert isinstance(expected, ExportPart)
        assert found.part.name == expected.part.name
        assert found.part.kind is expected.part.kind
        assert bytes(found.payload.buffers[0].data) == bytes(expected.payload.buffers[0].data)


def test_the_file_says_what_it_is() -> None:
    magic, line, _ = CONTENT.split(b"\n", 2)

    assert magic + b"\n" == MAGIC == b"semantic-agent/1\n"
    assert set(json.loads(line)) == {"kind", "nbytes", "sha256"}


@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_any_byte_that_changes_is_noticed(place: int, change: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[place] ^= change

    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        read(bytes(damaged))


@given(st.integers(0, len(CONTENT) - 1))
def test_a_file_that_is_cut_off_is_noticed(length: int) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        read(CONTENT[:length])


def test_a_frame_that_is_left_out_is_noticed() -> None:
    whole = list(FILE.write(ITEMS))
    # A line and a content for the turn, after the magic and the agent's two.
    without = b"".join([*whole[:3], *whole[5:]])

    with pytest.raises(InvalidRequestError, match="end does not match"):
        read(without)


@given(st.binary(max_size=200))
def test_nonsense_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read(MAGIC + content)


# -- signatures -------------------------------------------------------------------------------


def test_a_file_says_who_signed_it() -> None:
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


def test_a_file_of_an_older_server_is_not_signed() -> None:
    before, place = CONTENT, CONTENT.rindex(b'{"kind": "end"')
    end = json.loads(before[place:].split(b"\n", 1)[1])
    del end["hmac"]
    body = json.dumps(end).encode()
    head = {"kind": "end", "nbytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}

    assert signer(before[:place] + json.dumps(head).encode() + b"\n" + body) == ""


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
    spoilt = changed(CONTENT, with_frame_fields(kind, **fields))
    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        read(spoilt)


@pytest.mark.parametrize("ttl_s", ["abc", float("inf"), -1, 2**70])
def test_a_setting_that_no_client_could_make_is_refused(ttl_s: Any) -> None:
    spoilt = changed(CONTENT, with_fields("agent", ttl_s=ttl_s))
    with pytest.raises(InvalidRequestError, match="cannot be imported"):
        read(spoilt)
