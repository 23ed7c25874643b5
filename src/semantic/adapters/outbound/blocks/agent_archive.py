"""An agent as one file: a tar archive of JSON and block files, with checksums and a signature.

    agent.json  turns/000001.json …  blocks/<name>.<kind>.safetensors …  manifest.json

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
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, assert_never

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from semantic.adapters.outbound.blocks import format as block_format
from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.adapters.outbound.ledger import codec as ledger_json
from semantic.domain.agents import LOCAL_TENANT, Pointer, Turn
from semantic.domain.blocks import BlockName, BlockPart, pack_tokens, unpack_tokens
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, InvalidRequestError
from semantic.domain.spec import LayerKind
from semantic.ports.storage import ExportHead, ExportItem, ExportPart

FORMAT: Final = "semantic-agent/2"
OWN_SIGNER: Final = "this server"
_FORMER: Final = b"semantic-agent/1\n"
_BLOCK: Final = tarfile.BLOCKSIZE
END: Final = bytes(2 * _BLOCK)
_MAX_JSON: Final = 2**25  # bytes of one member
_MAX_ALL_JSON: Final = 2**27
_MAX_VALUES: Final = 2**21  # in all JSON members: a value takes up to 100 bytes of memory
_MAX_FILE: Final = 2**30
_MAX_MEMBERS: Final = 2**16
_KINDS: Final = "|".join(kind.value for kind in LayerKind)
_IS_MEMBER: Final = re.compile(
    r"(?P<agent>agent\.json)|(?P<turn>turns/[0-9]{6,9}\.json)|(?P<manifest>manifest\.json)"
    rf"|(?P<block>blocks/[0-9a-f]{{64}}\.(?:{_KINDS})\.safetensors)"
).fullmatch
_ORDER: Final = ("agent", "turn", "block", "manifest")


class AgentFile:
    """`AgentFilePort` with KV cache in the precision of block files."""

    def __init__(self, codec: KVCodec, keys: "ExportKeys") -> None:
        self._codec = codec
        self._keys = keys

    def write(self, items: Iterable[ExportItem]) -> Iterator[bytes]:
        digests: dict[str, str] = {}
        fingerprint, num_turns = "", 0
        for item in items:
            match item:
                case ExportHead():
                    fingerprint = item.fingerprint
                    name, pieces = "agent.json", [_head_bytes(item)]
                case Turn():
                    num_turns += 1
                    name, pieces = _turn_name(num_turns), [_turn_bytes(item)]
                case ExportPart():
                    name, pieces = _block_name(item.part), self._block_pieces(item, fingerprint)
                case _:
                    assert_never(item)
            digests[name] = _sha256(pieces)
            yield from compose_member(name, pieces)
        manifest = compose_manifest(digests, self._keys.sign(signed_text(digests)))
        yield from compose_member("manifest.json", [manifest])
        yield END

    def check(self, pieces: Iterable[bytes]) -> str:
        digests: dict[str, str] = {}
        signer = ""
        for member in read_members(pieces):
            if member.kind == "manifest":
                signer = self._signer(member, digests)
            elif member.name in digests or len(digests) >= _MAX_MEMBERS:
                raise _damaged(f"it has {member.name} twice, or more than {_MAX_MEMBERS} members")
            else:
                digests[member.name] = _sha256(member.pieces)
        return signer

    def read(self, pieces: Iterable[bytes], *, has_parts: bool) -> Iterator[ExportItem]:
        json_members = _JsonReader()
        for member in read_members(pieces):
            if member.kind == "block" and has_parts:
                yield _parsed(member, self._read_part)
            elif member.kind == "agent":
                yield _parsed(member, lambda head: _read_head(json_members.parse(head)))
            elif member.kind == "turn":
                yield _parsed(member, lambda turn: _read_turn(json_members.parse(turn)))

    def _signer(self, manifest: "Member", digests: dict[str, str]) -> str:
        content = manifest.content()
        match _JsonReader().parse_content(manifest.name, content):
            case {"hmac": str(signature)}:
                if content == compose_manifest(digests, signature):
                    return self._keys.signer(signed_text(digests), signature)
        raise _damaged("its manifest does not match its members")

    def _block_pieces(self, item: ExportPart, fingerprint: str) -> list[bytes]:
        pieces = block_format.compose(item.part, item.payload, self._codec, fingerprint)
        return [bytes(piece) for piece in pieces]

    def _read_part(self, member: "Member") -> ExportPart:
        part, payload = block_format.read(memoryview(member.content()), self._codec)
        if member.name != _block_name(part):
            raise _damaged(f"{member.name} does not match its name")
        return ExportPart(part, payload)


# -- the archive ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """A file of the archive: kind, as its name states, and content, which can be read once."""

    kind: str
    name: str
    pieces: Iterator[bytes]

    def content(self) -> bytes:
        return b"".join(self.pieces)


def compose_member(name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Write one member: its header, its content, and zeros up to a multiple of 512 bytes."""
    pieces = list(pieces)
    header = tarfile.TarInfo(name)
    header.size = sum(map(len, pieces))
    yield header.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    yield from pieces
    yield bytes(-header.size % _BLOCK)


def read_members(pieces: Iterable[bytes]) -> Iterator[Member]:
    """Read an archive's members, and check everything except their content.

    A member's content is streamed; this function keeps none of it in memory.

    Raises:
        InvalidRequestError: the archive is truncated, contains anything but the four kinds of
            members in their order, or has data after its end.
    """
    source = _Source(pieces)
    if source.peek(len(_FORMER)) == _FORMER:
        raise _damaged("an earlier version of Semantic wrote it; export the agent again")
    before, num_turns, num_json = "", 0, 0
    while before != "manifest":
        kind, name, num_bytes = _read_header(source.take(_BLOCK))
        if (before == "") != (kind == "agent") or (
            before and _ORDER.index(kind) < _ORDER.index(before)
        ):
            raise _damaged(f"{name} is out of order")
        if kind == "turn":
            num_turns += 1
            if name != _turn_name(num_turns):
                raise _damaged(f"{name} is out of order")
        num_json += num_bytes if kind != "block" else 0
        if num_json > _MAX_ALL_JSON:
            raise _damaged(f"its turns exceed {_MAX_ALL_JSON >> 20} MB")
        content = source.stream(num_bytes)
        yield Member(kind, name, content)
        for _ in content:
            pass  # skip what the caller did not read
        if any(source.take(-num_bytes % _BLOCK)):
            raise _damaged(f"something follows {name} that belongs to no member")
        before = kind
    if source.take(len(END)) != END or not source.has_only_zeros():
        raise _damaged("data follows its manifest")


def _read_header(header: bytes) -> tuple[str, str, int]:
    try:
        member = tarfile.TarInfo.frombuf(header, "ascii", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise _damaged("it is not an archive of an agent, or it is damaged") from error
    if header[148:156] != b"%06o\0 " % member.chksum:  # the checksum does not cover itself
        raise _damaged("it is damaged")
    named = _IS_MEMBER(member.name)
    if named is None or member.type != tarfile.REGTYPE or member.linkname:
        raise _damaged(f"it has a member {member.name[:100]!r} that agents do not have")
    kind = str(named.lastgroup)
    if not 0 <= member.size <= (_MAX_FILE if kind == "block" else _MAX_JSON):
        raise _damaged(f"{member.name} is too long")
    return kind, member.name, member.size


class _Source:
    """Reads exact numbers of bytes from an iterator of arbitrary pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._buffer = bytearray()

    def peek(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            piece = next(self._pieces, None)
            if piece is None:
                raise _damaged("it is truncated")
            self._buffer += piece
        return bytes(self._buffer[:num_bytes])

    def take(self, num_bytes: int) -> bytes:
        taken = self.peek(num_bytes)
        del self._buffer[:num_bytes]
        return taken

    def stream(self, num_bytes: int) -> Iterator[bytes]:
        while num_bytes:
            if not self._buffer:
                self.peek(1)
            piece = self.take(min(num_bytes, len(self._buffer)))
            num_bytes -= len(piece)
            yield piece

    def has_only_zeros(self) -> bool:
        """Read to the end; tar tools pad the last record with zeros."""
        return not any(piece.strip(b"\0") for piece in chain([bytes(self._buffer)], self._pieces))


def compose_manifest(digests: Mapping[str, str], signature: str) -> bytes:
    """Write the manifest: the SHA-256 of all other members in order, and the signature."""
    manifest = {"format": FORMAT, "sha256": digests, "hmac": signature}
    return json.dumps(manifest, indent=1).encode() + b"\n"


def signed_text(digests: Mapping[str, str]) -> bytes:
    """The signed text: the format's name and a line per member, as `sha256sum` prints it."""
    lines = (f"{digest}  {name}\n" for name, digest in digests.items())
    return f"{FORMAT}\n{''.join(lines)}".encode()


def _sha256(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _turn_name(number: int) -> str:
    return f"turns/{number:06}.json"


def _block_name(part: BlockPart) -> str:
    return f"blocks/{part.name.hex()}.{part.kind.value}.safetensors"


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


class _JsonReader:
    """Parses the JSON members of one archive and limits their total number of values."""

    def __init__(self) -> None:
        self._num_values = 0

    def parse(self, member: Member) -> Any:
        return self.parse_content(member.name, member.content())

    def parse_content(self, name: str, content: bytes) -> Any:
        self._num_values += sum(map(content.count, (b"[", b"{", b",")))
        if self._num_values > _MAX_VALUES:
            raise _damaged(f"{name} has too many values")
        try:
            return ledger_json.parse(content, is_foreign=True)
        except (ValueError, RecursionError) as error:
            raise _damaged(f"{name} is not JSON: {error}") from error


def _parsed(member: Member, parse: Callable[[Member], ExportItem]) -> ExportItem:
    try:
        return parse(member)
    except (CacheCorruptionError, CachePersistenceError) as error:
        raise _damaged(error.message) from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _damaged(f"{member.name} is invalid: {place}: {first['msg']}") from error
    except ValueError as error:
        raise _damaged(f"{member.name} is invalid: {error}") from error


def _damaged(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the file cannot be imported: {problem.rstrip('.')}.", param="file")


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
