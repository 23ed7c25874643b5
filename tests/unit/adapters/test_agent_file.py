import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.agent_file import MAGIC, AgentFile
from semantic.adapters.outbound.kv_codec import KVCodec
from semantic.domain.agents import Agent, AgentProfile, Pointer, Reuse, Turn
from semantic.domain.blocks import BlockName, BlockPart, block_name, pack_tokens
from semantic.domain.chat import Message, Role, Usage
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import FinishReason
from semantic.domain.spec import LayerKind
from semantic.ports.outbound import HostBuffer, KVPayload
from semantic.ports.persistence import ExportHead, ExportItem, ExportPart

pytestmark = pytest.mark.unit

ROOT = BlockName(bytes(32))
NAME = block_name(ROOT, [1, 2, 3])
HEAD = ExportHead(
    Agent("a", 1.5, head="t1", num_turns=1, profile=AgentProfile("half \ud800")), "m", "f", "abi"
)
TURN = Turn(
    id="t1",
    parent=None,
    agent_id="",
    messages=(Message.of(Role.USER, "ä \ud800"),),
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
FILE = AgentFile(KVCodec())
CONTENT = b"".join(FILE.write(ITEMS))


def read(content: bytes, size: int = 1000) -> list[ExportItem]:
    pieces = (content[i : i + size] for i in range(0, len(content), size))
    return list(FILE.read(pieces))


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
