"""An agent as one file: a tar archive of JSON and block files, with checksums and a signature.

    agent.json  turns/000001.json …  images/<sha256> …  blocks/<name>.<kind>.safetensors …
    manifest.json

`docs/agents.md` describes the format. Checksums reveal damage. Only the signature proves that a
server with a known key wrote the file: a block's name follows from its tokens, but does not prove
that its KV cache was computed correctly. All content is checked before use, no content is executed,
and no name from the archive is used as a path.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, assert_never

from pydantic import BaseModel, ConfigDict, Field

from semantic.adapters.outbound.blocks import archive
from semantic.adapters.outbound.blocks.archive import ArchiveLayout, Member
from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.adapters.outbound.ledger import codec as ledger_json
from semantic.domain.agents import LOCAL_TENANT, Pointer, Turn
from semantic.domain.blocks import BlockName, pack_tokens, unpack_tokens
from semantic.domain.errors import CachePersistenceError
from semantic.ports.storage import ExportHead, ExportImage, ExportItem, ExportPart

FORMAT: Final = "semantic-agent/2"
OWN_SIGNER: Final = "this server"
LAYOUT: Final = ArchiveLayout(
    FORMAT,
    "agent",
    {
        "agent": r"agent\.json",
        "turn": r"turns/[0-9]{6,9}\.json",
        "image": r"images/[0-9a-f]{64}",
        "block": archive.BLOCK_NAMES,
    },
    former=b"semantic-agent/1\n",
)
_damaged: Final = LAYOUT.damaged


class AgentFile:
    """`AgentFilePort` with KV cache in the precision of block files."""

    def __init__(self, codec: KVCodec, keys: "ExportKeys") -> None:
        self._codec = codec
        self._keys = keys

    def write(self, items: Iterable[ExportItem]) -> Iterator[bytes]:
        def manifest_of(digests: Mapping[str, str]) -> bytes:
            return compose_manifest(digests, self._keys.sign(signed_text(digests)))

        return archive.compose_archive(self._members(items), manifest_of)

    def _members(self, items: Iterable[ExportItem]) -> Iterator[tuple[str, list[bytes]]]:
        fingerprint, num_turns = "", 0
        for item in items:
            match item:
                case ExportHead():
                    fingerprint = item.fingerprint
                    yield "agent.json", [_head_bytes(item)]
                case Turn():
                    num_turns += 1
                    yield _turn_name(num_turns), [_turn_bytes(item)]
                case ExportImage():
                    yield f"images/{item.digest}", [item.data]
                case ExportPart():
                    pieces = archive.block_pieces(item, self._codec, fingerprint)
                    yield archive.block_name(item.part), pieces
                case _:
                    assert_never(item)

    def check(self, pieces: Iterable[bytes]) -> str:
        return archive.check(read_members(pieces), LAYOUT, self._signer)

    def read(self, pieces: Iterable[bytes], *, has_parts: bool) -> Iterator[ExportItem]:
        json_members = archive.JsonReader(LAYOUT)
        for member in read_members(pieces):
            if member.kind == "block" and has_parts:
                yield archive.read_part(member, self._codec, LAYOUT)
            elif member.kind == "image":
                yield _read_image(member)
            elif member.kind == "agent":
                yield archive.parsed(member, LAYOUT, lambda m: _read_head(json_members.parse(m)))
            elif member.kind == "turn":
                yield archive.parsed(member, LAYOUT, lambda m: _read_turn(json_members.parse(m)))

    def _signer(self, manifest: Member, digests: Mapping[str, str]) -> str:
        content = manifest.content()
        match archive.JsonReader(LAYOUT).parse_content(manifest.name, content):
            case {"hmac": str(signature)}:
                if content == compose_manifest(digests, signature):
                    return self._keys.signer(signed_text(digests), signature)
        raise _damaged("its manifest does not match its members")


# -- the archive ------------------------------------------------------------------------------


def read_members(pieces: Iterable[bytes]) -> Iterator[Member]:
    """Read an archive's members like `archive.read_members`; turns are numbered without gaps."""
    num_turns = 0
    for member in archive.read_members(pieces, LAYOUT):
        if member.kind == "turn":
            num_turns += 1
            if member.name != _turn_name(num_turns):
                raise _damaged(f"{member.name} is out of order")
        yield member


def compose_manifest(digests: Mapping[str, str], signature: str) -> bytes:
    """Write the manifest: the SHA-256 of all other members in order, and the signature."""
    return archive.compose_manifest(FORMAT, digests, {"hmac": signature})


def signed_text(digests: Mapping[str, str]) -> bytes:
    """The signed text: the format's name and a line per member, as `sha256sum` prints it."""
    return archive.signed_text(FORMAT, digests)


def _turn_name(number: int) -> str:
    return f"turns/{number:06}.json"


def _read_image(member: Member) -> ExportImage:
    digest, data = member.name.removeprefix("images/"), member.content()
    if hashlib.sha256(data).hexdigest() != digest:
        raise _damaged(f"{member.name} does not match its name")
    return ExportImage(digest, data)


# -- JSON members -----------------------------------------------------------------------------

_Name = Annotated[str, Field(max_length=1024)]
_BlockHex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _JsonMember(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _HeadMember(_JsonMember):
    id: str
    model: _Name
    fingerprint: _Name
    abi: _Name
    body: dict[str, Any]


class _TurnMember(_JsonMember):
    id: _Name
    parent: _Name | None
    num_tokens: ledger_json.Count
    created_at: float
    tokens: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")]
    pointer: Annotated[tuple[_BlockHex, _BlockHex, ledger_json.Count], Field(strict=False)] | None
    body: dict[str, Any]


def _head_bytes(head: ExportHead) -> bytes:
    named = {"model": head.model, "fingerprint": head.fingerprint, "abi": head.abi}
    body = json.loads(ledger_json.encode_agent(head.agent))
    return json.dumps({"id": head.agent.id, **named, "body": body}).encode()


def _read_head(content: Any) -> ExportHead:
    stored = _HeadMember.model_validate(content)
    body = json.dumps(stored.body)
    agent = ledger_json.decode_agent(LOCAL_TENANT, stored.id, body, is_foreign=True)
    return ExportHead(agent, stored.model, stored.fingerprint, stored.abi)


def _turn_bytes(turn: Turn) -> bytes:
    # The divergence refers to another conversation, which is not exported.
    body = ledger_json.encode_turn(ledger_json.TurnBody.of(replace(turn, divergence=None)))
    pointer = turn.pointer
    place = [pointer.root.hex(), pointer.block.hex(), pointer.num_tokens] if pointer else None
    return json.dumps(
        {
            "id": turn.id,
            "parent": turn.parent,
            "num_tokens": turn.num_tokens,
            "created_at": turn.created_at,
            "tokens": pack_tokens(turn.tokens).hex(),
            "pointer": place,
            "body": json.loads(body),
        }
    ).encode()


def _read_turn(content: Any) -> Turn:
    stored = _TurnMember.model_validate(content)
    turn_body = ledger_json.decode_turn(json.dumps(stored.body), is_foreign=True)
    pointer = None
    if stored.pointer is not None:
        *names, num_tokens = stored.pointer
        root, block = (BlockName(bytes.fromhex(str(name))) for name in names)
        pointer = Pointer(root, block, int(num_tokens))
    return replace(turn_body, divergence=None).turn(
        id=stored.id,
        parent=stored.parent,
        agent_id="",
        tokens=unpack_tokens(bytes.fromhex(stored.tokens)),
        num_tokens=stored.num_tokens,
        pointer=pointer,
        created_at=stored.created_at,
    )


# -- keys -------------------------------------------------------------------------------------

_KEY_BYTES: Final = 32
_KEY_PATTERN: Final = re.compile(r"[0-9a-f]{64}\n?")


@dataclass(frozen=True, slots=True)
class ExportKeys:
    """Signs with this server's key and verifies signatures of several keys.

    A key is a shared secret: everyone who has it can create its owner's signatures.
    """

    own: bytes = field(repr=False)
    trusted: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def sign(self, content: bytes) -> str:
        return _signature(self.own, content)

    def signer(self, content: bytes, signature: str) -> str:
        """Return the name of the key that made a signature; empty if the key is unknown."""
        known = {OWN_SIGNER: self.own, **self.trusted}
        matching = [
            name
            for name, key in known.items()
            if hmac.compare_digest(_signature(key, content).encode(), signature.encode())
        ]
        return matching[0] if matching else ""


def own_key(path: Path) -> bytes:
    """Read this installation's key; creates it if the file is missing.

    Raises:
        CachePersistenceError: the file cannot be read or created, or is not a key.
    """
    try:
        if not path.exists():
            _make(path)
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise CachePersistenceError(f"{path} cannot be used: {error}.") from error
    if not _KEY_PATTERN.fullmatch(text):
        raise CachePersistenceError(
            f"{path} is not a key: 64 hexadecimal digits. Delete it, and the server creates a "
            "new one; it then treats files that it exported before as untrusted."
        )
    return bytes.fromhex(text)


def _make(path: Path) -> None:
    """Create the file atomically; if another process was first, its file stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _signature(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()
