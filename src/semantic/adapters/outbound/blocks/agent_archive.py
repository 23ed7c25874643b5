"""An agent as one file: frames of JSON and block files, each with its checksum, and a signature.

`docs/agents.md` describes the format. Checksums show damage; only the signature shows that a server
whose key is known here wrote the file. Everything that is read is checked before it is believed;
nothing in it is executed.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from semantic.adapters.outbound.blocks import block_file
from semantic.adapters.outbound.blocks.export_keys import ExportKeys
from semantic.adapters.outbound.blocks.kv_codec import KVCodec
from semantic.adapters.outbound.ledger import codec as ledger_json
from semantic.domain.agents import LOCAL_TENANT, Pointer, Turn
from semantic.domain.blocks import BlockName, pack_tokens, unpack_tokens
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, InvalidRequestError
from semantic.ports.backend import KVPayload
from semantic.ports.storage import ExportHead, ExportItem, ExportPart

MAGIC: Final = b"semantic-agent/1\n"
_MAX_LINE: Final = 4096
_MAX_FRAME: Final = 2**30


class AgentFile:
    """`AgentFilePort` with attention state in its resting precision."""

    def __init__(self, codec: KVCodec, keys: ExportKeys) -> None:
        self._codec = codec
        self._keys = keys

    def write(self, items: Iterable[ExportItem]) -> Iterator[bytes]:
        """Write a file, piece by piece."""
        whole = hashlib.sha256()
        fingerprint, num_frames = "", 0
        yield MAGIC
        for item in items:
            if isinstance(item, ExportHead):
                fingerprint = item.fingerprint
            kind, pieces = self._composed(item, fingerprint)
            yield from _frame(kind, pieces, whole)
            num_frames += 1
        end = {"num_frames": num_frames, "sha256": whole.hexdigest()}
        signed = end | {"hmac": self._keys.sign(MAGIC + whole.digest())}
        yield from _frame("end", [json.dumps(signed).encode()], whole)

    def check(self, pieces: Iterable[bytes]) -> str:
        """Read a file to its end, see that it is whole, and say whose signature it has."""
        source, whole, num_frames = _opened(pieces), hashlib.sha256(), 0
        while True:
            so_far = whole.copy()
            kind, content = _read_frame(source, whole)
            if kind == "end":
                break
            num_frames += 1
        match _parse(content):
            case {"num_frames": int(number), "sha256": str(digest), **more}:
                if (number, digest) == (num_frames, so_far.hexdigest()):
                    return self._keys.signer(MAGIC + so_far.digest(), str(more.get("hmac", "")))
        raise _damaged("its end does not match its content")

    def read(self, pieces: Iterable[bytes], *, has_parts: bool) -> Iterator[ExportItem]:
        """Read a file that was checked; blocks are passed over unless `has_parts`."""
        source, whole = _opened(pieces), hashlib.sha256()
        while True:
            kind, content = _read_frame(source, whole)
            if kind == "end":
                return
            if has_parts or kind != "block":
                yield self._parsed(kind, content)

    def _composed(self, item: ExportItem, fingerprint: str) -> tuple[str, list[bytes]]:
        match item:
            case ExportHead():
                return "agent", [_head_bytes(item)]
            case Turn():
                return "turn", [_turn_bytes(item)]
            case ExportPart(part, payload):
                resting = self._codec.encode(payload)
                pieces = block_file.compose(
                    part, payload, resting, self._codec.kv_format, fingerprint
                )
                return "block", [bytes(piece) for piece in pieces]

    def _parsed(self, kind: str, content: bytes) -> ExportItem:
        try:
            match kind:
                case "agent":
                    return _read_head(_HeadFrame.model_validate(_parse(content)))
                case "turn":
                    return _read_turn(_TurnFrame.model_validate(_parse(content)))
                case "block":
                    return self._read_part(memoryview(content))
        except (CacheCorruptionError, CachePersistenceError) as error:
            raise _damaged(error.message) from error
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise _damaged(f"its {kind} makes no sense: {place}: {first['msg']}") from error
        except ValueError as error:
            raise _damaged(f"its {kind} makes no sense: {error}") from error
        raise _damaged(f"it has a frame of an unknown kind {kind[:20]!r}")

    def _read_part(self, content: memoryview) -> ExportPart:
        block_file.verify(content)
        end = block_file.LENGTH_BYTES + block_file.header_length(content, len(content))
        head = block_file.parse(content[block_file.LENGTH_BYTES : end], len(content))
        tokens = bytes(content[head.tokens.start : head.tokens.end])
        part = block_file.identify(head, tokens, len(content), 0.0)
        resting = block_file.resting_buffers(head, content)
        buffers = tuple(self._codec.decode(buffer) for buffer in resting)
        positions = int(head.field("start")), int(head.field("end"))
        return ExportPart(part, KVPayload(head.field("abi"), part.kind, *positions, buffers))


# -- frames -----------------------------------------------------------------------------------


class _Source:
    """Bytes as they are asked for, out of pieces as they come."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._buffer = bytearray()

    def take(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            self._buffer += self._next()
        taken = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return taken

    def take_line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MAX_LINE:
                raise _damaged("a frame has no beginning")
            self._buffer += self._next()
        return self.take(end + 1)

    def _next(self) -> bytes:
        for piece in self._pieces:
            return piece
        raise _damaged("it is cut off")


def _opened(pieces: Iterable[bytes]) -> _Source:
    source = _Source(pieces)
    if source.take(len(MAGIC)) != MAGIC:
        raise _damaged("it is no file of an agent")
    return source


def _frame(kind: str, pieces: list[bytes], whole: "hashlib._Hash") -> Iterator[bytes]:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    num_bytes = sum(map(len, pieces))
    head = json.dumps({"kind": kind, "nbytes": num_bytes, "sha256": digest.hexdigest()})
    line = head.encode() + b"\n"
    whole.update(line)
    yield line
    yield from pieces


def _read_frame(source: _Source, whole: "hashlib._Hash") -> tuple[str, bytes]:
    line = source.take_line()
    match _parse(line):
        case {"kind": str(kind), "nbytes": int(num_bytes), "sha256": str(digest)}:
            if not 0 <= num_bytes <= _MAX_FRAME:
                raise _damaged("a frame cannot be that long")
            content = source.take(num_bytes)
            if hashlib.sha256(content).hexdigest() != digest:
                raise _damaged("a checksum does not match")
            whole.update(line)
            return kind, content
    raise _damaged("a frame has no beginning")


# -- what is in them --------------------------------------------------------------------------

_Name = Annotated[str, Field(max_length=1024)]
_BlockHex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Frame(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _HeadFrame(_Frame):
    id: str
    model: _Name
    fingerprint: _Name
    abi: _Name
    body: str


class _TurnFrame(_Frame):
    id: _Name
    parent: _Name | None
    num_tokens: ledger_json.Count
    created_at: float
    tokens: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")]
    pointer: Annotated[tuple[_BlockHex, _BlockHex, ledger_json.Count], Field(strict=False)] | None
    body: str


def _head_bytes(head: ExportHead) -> bytes:
    body = ledger_json.encode_agent(head.agent)
    named = {"model": head.model, "fingerprint": head.fingerprint, "abi": head.abi}
    return json.dumps({"id": head.agent.id, **named, "body": body}).encode()


def _read_head(stored: _HeadFrame) -> ExportHead:
    agent = ledger_json.decode_agent(LOCAL_TENANT, stored.id, stored.body, is_foreign=True)
    return ExportHead(agent, stored.model, stored.fingerprint, stored.abi)


def _turn_bytes(turn: Turn) -> bytes:
    # Where it left another conversation is not told: that one stays behind.
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
            "body": body,
        }
    ).encode()


def _read_turn(stored: _TurnFrame) -> Turn:
    said = ledger_json.decode_turn(stored.body, is_foreign=True)
    pointer = None
    if stored.pointer is not None:
        *names, num_tokens = stored.pointer
        root, block = (BlockName(bytes.fromhex(str(name))) for name in names)
        pointer = Pointer(root, block, int(num_tokens))
    return Turn(
        id=stored.id,
        parent=stored.parent,
        agent_id="",
        messages=said.messages,
        tokens=unpack_tokens(bytes.fromhex(stored.tokens)),
        num_tokens=stored.num_tokens,
        pointer=pointer,
        usage=said.usage,
        created_at=stored.created_at,
        reuse=said.reuse,
        num_messages=said.num_messages,
        digest=said.digest,
        num_dropped=said.num_dropped,
        model=said.model,
        reason=said.reason,
    )


def _parse(content: bytes) -> Any:
    try:
        return ledger_json.parse(content, is_foreign=True)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"a frame is not JSON: {error}") from error


def _damaged(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the file cannot be imported: {problem.rstrip('.')}.", param="file")
