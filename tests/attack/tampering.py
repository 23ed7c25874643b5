"""An exported agent taken apart, changed, and put together again with every checksum right.

The archive's layout is that of `docs/agents.md`; `tests/agent_files.py` packs and unpacks it.
"""

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests import agent_files
from tests.attack.mutations import change_somewhere, written
from tests.unit.adapters.outbound.blocks.sealed_files import put_together, take_apart
from tests.unit.adapters.outbound.ledger.test_codec import WRONG_SETTINGS


@dataclass
class Member:
    """One file of an archive."""

    name: str
    content: bytes

    @property
    def kind(self) -> str:
        """`agent`, `turn` or `block`."""
        return {"agent.json": "agent", "turns": "turn"}.get(self.name.split("/")[0], "block")


@dataclass
class Export:
    """An archive, without its manifest."""

    members: list[Member]
    signature: Any

    @classmethod
    def parse(cls, file: bytes) -> "Export":
        """Take an archive apart."""
        *files, (_, manifest) = agent_files.members(file)
        hmac = json.loads(manifest)["hmac"]
        return cls([Member(name, content) for name, content in files], hmac)

    def compose(self) -> bytes:
        """Put it together, with every checksum that can be known computed anew."""
        files = [(member.name, member.content) for member in self.members]
        return agent_files.packed(files, self.signature)

    def of_kind(self, kind: str) -> list[Member]:
        return [member for member in self.members if member.kind == kind]


def untouched(export: Export, dice: random.Random) -> None:
    """Change nothing: an honest file is welcome, whatever else is refused."""


# -- fields -----------------------------------------------------------------------------------


def _change_member(member: Member, dice: random.Random) -> None:
    document = json.loads(member.content)
    # Settings, messages and figures are in the body.
    change_somewhere(document["body"] if dice.random() < 0.7 else document, dice)
    member.content = written(document, dice)


def agent_fields(export: Export, dice: random.Random) -> None:
    _change_member(export.of_kind("agent")[0], dice)


def turn_fields(export: Export, dice: random.Random) -> None:
    _change_member(dice.choice(export.of_kind("turn")), dice)


def hostile_settings(export: Export, dice: random.Random) -> None:
    """Settings that are well-formed JSON and would break a server that applied them."""
    member = export.of_kind("agent")[0]
    document = json.loads(member.content)
    document["body"].update(dice.choice([*WRONG_SETTINGS.values()]))
    member.content = json.dumps(document).encode()


# -- the KV cache --------------------------------------------------------------------------


def block_payload(export: Export, dice: random.Random) -> None:
    """Change what a block holds, and make its checksum right again."""
    blocks = export.of_kind("block")
    if not blocks:
        return
    member = dice.choice(blocks)
    header, data = take_apart(member.content)
    changed = bytearray(data)
    for name, tensor in header.items():
        if name not in {"__metadata__", "tokens"}:
            start, end = tensor["data_offsets"]
            changed[start:end] = dice.randbytes(end - start)
    member.content = put_together(header, bytes(changed))


def all_payloads(export: Export, dice: random.Random) -> None:
    for member in list(export.of_kind("block")):
        block_payload(Export([member], ""), dice)


def block_header(export: Export, dice: random.Random) -> None:
    """Change a field of a block's header."""
    blocks = export.of_kind("block")
    if not blocks:
        return
    member = dice.choice(blocks)
    header, data = take_apart(member.content)
    metadata = header["__metadata__"]
    key = dice.choice([key for key in metadata if key != "checksum"])
    changes = ("", "0", "-1", "9" * 30, "nan", "f" * 64, "\ud800", metadata[key][::-1])
    metadata[key] = dice.choice(changes)
    member.content = put_together(header, data)


def said_otherwise(export: Export, dice: random.Random) -> None:
    """The log tells of other words than the tokens are of."""
    member = dice.choice(export.of_kind("turn"))
    document = json.loads(member.content)
    size = len(document["tokens"]) // 8
    document["tokens"] = b"".join(
        struct.pack("<I", dice.choice((65, 97, 255, 2**31))) for _ in range(size)
    ).hex()
    member.content = json.dumps(document).encode()


def pointers(export: Export, dice: random.Random) -> None:
    member = dice.choice(export.of_kind("turn"))
    document = json.loads(member.content)
    document["pointer"] = dice.choice(
        (
            ["00" * 32, "11" * 32, 10],
            ["", "", 0],
            ["zz", "zz", 1],
            [*(document["pointer"] or ["00", "00"])[:2], 2**70],
            [1, 2, 3],
            {"a": 1},
        )
    )
    member.content = json.dumps(document).encode()


# -- order and bytes --------------------------------------------------------------------------


def member_order(export: Export, dice: random.Random) -> None:
    how = dice.randrange(5)
    if how == 0:
        dice.shuffle(export.members)
    elif how == 1:
        export.members.reverse()
    elif how == 2:
        del export.members[dice.randrange(len(export.members))]
    elif how == 3:
        export.members.insert(1, dice.choice(export.members))
    else:
        names = ("unknown", "agent.json", "turns/999999.json", "../../x", "/etc/passwd", "blocks/x")
        export.members.append(Member(dice.choice(names), b"{}"))


def member_content(export: Export, dice: random.Random) -> None:
    member = dice.choice(export.members)
    member.content = dice.choice(
        (
            b"",
            b"{",
            b"null",
            b"[]",
            b"\xff",
            b"5",
            b'"x"',
            b"[" * 900 + b"]" * 900,
            b'{"a":' * 100_000,
            dice.randbytes(1000),
            b"NaN",
        )
    )


def signature(export: Export, dice: random.Random) -> None:
    """Who vouches for it."""
    export.signature = dice.choice(("", "0" * 64, "f" * 64, "x", export.signature[::-1]))


CHANGES: tuple[Callable[[Export, random.Random], None], ...] = (
    hostile_settings,
    all_payloads,
    agent_fields,
    turn_fields,
    block_payload,
    block_header,
    said_otherwise,
    pointers,
    member_order,
    member_content,
    signature,
    untouched,
)


def spoil_bytes(file: bytes, dice: random.Random) -> bytes:
    """Change the bytes of a whole file, checksums or no checksums."""
    content = bytearray(file)
    how = dice.randrange(4)
    if how == 0:
        return bytes(content[: dice.randrange(len(content))])
    if how == 1:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    elif how == 2:
        content += dice.randbytes(100)
    else:
        content[:8] = b"SEMANTIC"
    return bytes(content)
