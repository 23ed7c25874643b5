"""A tar archive of JSON and block files with checksums and a signature, as exported files are.

Members have a fixed order, and the last one is `manifest.json`, with the SHA-256 of all others.
Nothing is compressed, so a file never expands. No name from an archive is used as a path.
`agent_archive.py` and `pack_archive.py` define what the members contain.
"""

import hashlib
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from semantic.adapters.outbound.blocks import format as block_format
from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.adapters.outbound.ledger import codec as ledger_json
from semantic.domain.blocks import BlockPart
from semantic.domain.errors import CacheCorruptionError, CachePersistenceError, InvalidRequestError
from semantic.domain.spec import LayerKind
from semantic.ports.storage import ExportPart

_BLOCK: Final = tarfile.BLOCKSIZE
END: Final = bytes(2 * _BLOCK)
_MAX_JSON: Final = 2**25  # bytes of one member, also of one image
_MAX_ALL_JSON: Final = 2**27
_BINARY: Final = ("block", "image")  # kinds of members that are not JSON
_MAX_FILE: Final = 2**30
_MAX_MEMBERS: Final = 2**16
_MAX_VALUES: Final = 2**21  # in all JSON members: a value takes up to 100 bytes of memory
_KINDS: Final = "|".join(kind.value for kind in LayerKind)
_T = TypeVar("_T")
BLOCK_NAMES: Final = rf"blocks/[0-9a-f]{{64}}\.(?:{_KINDS})\.safetensors"


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """The members of one type of archive.

    Attributes:
        format: The format's name and version, in the manifest.
        noun: What a file contains, for messages.
        kinds: Patterns of the members' names, by kind and in order. There is exactly one member of
            the first kind; `manifest.json` follows the last.
        former: How files of an earlier version begin.
    """

    format: str
    noun: str
    kinds: Mapping[str, str]
    former: bytes = b"\xff"

    @property
    def order(self) -> tuple[str, ...]:
        return (*self.kinds, "manifest")

    def kind_of(self, name: str) -> str | None:
        patterns = {**self.kinds, "manifest": r"manifest\.json"}
        return next((kind for kind, names in patterns.items() if re.fullmatch(names, name)), None)

    def damaged(self, problem: str) -> InvalidRequestError:
        reason = problem.rstrip(".")
        return InvalidRequestError(f"the file cannot be imported: {reason}.", param="file")


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


def compose_archive(
    members: Iterable[tuple[str, list[bytes]]], manifest_of: Callable[[Mapping[str, str]], bytes]
) -> Iterator[bytes]:
    """Write members by name, then the manifest that is made of their digests."""
    digests: dict[str, str] = {}
    for name, pieces in members:
        digests[name] = sha256(pieces)
        yield from compose_member(name, pieces)
    yield from compose_member("manifest.json", [manifest_of(digests)])
    yield END


def read_members(pieces: Iterable[bytes], layout: ArchiveLayout) -> Iterator[Member]:
    """Read an archive's members, and check everything except their content.

    A member's content is streamed; this function keeps none of it in memory.

    Raises:
        InvalidRequestError: the archive is truncated, contains anything but the members of the
            layout in their order, or has data after its end.
    """
    source, order, damaged = _Source(pieces, layout), layout.order, layout.damaged
    if source.peek(len(layout.former)) == layout.former:
        raise damaged(f"an earlier version of Semantic wrote it; export the {layout.noun} again")
    before, num_json = "", 0
    while before != "manifest":
        kind, name, num_bytes = _read_header(source.take(_BLOCK), layout)
        if (before == "") != (kind == order[0]) or (
            before and order.index(kind) < order.index(before)
        ):
            raise damaged(f"{name} is out of order")
        num_json += num_bytes if kind not in _BINARY else 0
        if num_json > _MAX_ALL_JSON:
            raise damaged(f"its JSON members exceed {_MAX_ALL_JSON >> 20} MB")
        content = source.stream(num_bytes)
        yield Member(kind, name, content)
        for _ in content:
            pass  # skip what the caller did not read
        if any(source.take(-num_bytes % _BLOCK)):
            raise damaged(f"something follows {name} that belongs to no member")
        before = kind
    if source.take(len(END)) != END or not source.has_only_zeros():
        raise damaged("data follows its manifest")


def _read_header(header: bytes, layout: ArchiveLayout) -> tuple[str, str, int]:
    try:
        member = tarfile.TarInfo.frombuf(header, "ascii", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise layout.damaged(f"it is not an archive of {_a(layout)}, or it is damaged") from error
    if header[148:156] != b"%06o\0 " % member.chksum:  # the checksum does not cover itself
        raise layout.damaged("it is damaged")
    kind = layout.kind_of(member.name)
    if kind is None or member.type != tarfile.REGTYPE or member.linkname:
        name = member.name[:100]
        raise layout.damaged(f"it has a member {name!r} that {layout.noun}s do not have")
    if not 0 <= member.size <= (_MAX_FILE if kind == "block" else _MAX_JSON):
        raise layout.damaged(f"{member.name} is too long")
    return kind, member.name, member.size


def _a(layout: ArchiveLayout) -> str:
    return f"{'an' if layout.noun[0] in 'aeiou' else 'a'} {layout.noun}"


class _Source:
    """Reads exact numbers of bytes from an iterator of arbitrary pieces."""

    def __init__(self, pieces: Iterable[bytes], layout: ArchiveLayout) -> None:
        self._layout = layout
        self._pieces = iter(pieces)
        self._buffer = bytearray()

    def peek(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            piece = next(self._pieces, None)
            if piece is None:
                raise self._layout.damaged("it is truncated")
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


def check(
    members: Iterable[Member],
    layout: ArchiveLayout,
    read_manifest: Callable[[Member, Mapping[str, str]], str],
) -> str:
    """Read an archive to its end; returns what `read_manifest` says of the manifest.

    `read_manifest` receives the manifest and the digests of all other members, in order.
    """
    digests: dict[str, str] = {}
    found = ""
    for member in members:
        if member.kind == "manifest":
            found = read_manifest(member, digests)
        elif member.name in digests or len(digests) >= _MAX_MEMBERS:
            problem = f"it has {member.name} twice, or more than {_MAX_MEMBERS} members"
            raise layout.damaged(problem)
        else:
            digests[member.name] = sha256(member.pieces)
    return found


def compose_manifest(name: str, digests: Mapping[str, str], signature: Mapping[str, str]) -> bytes:
    """Write the manifest: the format, the SHA-256 of all other members, and the signature."""
    manifest = {"format": name, "sha256": digests, **signature}
    return json.dumps(manifest, indent=1).encode() + b"\n"


def signed_text(name: str, digests: Mapping[str, str]) -> bytes:
    """The signed text: the format's name and a line per member, as `sha256sum` prints it."""
    lines = (f"{digest}  {member}\n" for member, digest in digests.items())
    return f"{name}\n{''.join(lines)}".encode()


def sha256(pieces: Iterable[bytes]) -> str:
    """Return the digest of a member's content as hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def block_name(part: BlockPart) -> str:
    """Return the name of the member with a part of a block."""
    return f"blocks/{part.name.hex()}.{part.kind.value}.safetensors"


def block_pieces(item: ExportPart, codec: KVCodec, fingerprint: str) -> list[bytes]:
    """Return the content of the member with a part of a block."""
    pieces = block_format.compose(item.part, item.payload, codec, fingerprint)
    return [bytes(piece) for piece in pieces]


# -- reading untrusted members ----------------------------------------------------------------


class JsonReader:
    """Parses the JSON members of one archive and limits their total number of values."""

    def __init__(self, layout: ArchiveLayout) -> None:
        self._layout = layout
        self._num_values = 0

    def parse(self, member: Member) -> Any:
        return self.parse_content(member.name, member.content())

    def parse_content(self, name: str, content: bytes) -> Any:
        self._num_values += sum(map(content.count, (b"[", b"{", b",")))
        if self._num_values > _MAX_VALUES:
            raise self._layout.damaged(f"{name} has too many values")
        try:
            return ledger_json.parse(content, is_foreign=True)
        except (ValueError, RecursionError) as error:
            raise self._layout.damaged(f"{name} is not JSON: {error}") from error


def read_part(member: Member, codec: KVCodec, layout: ArchiveLayout) -> ExportPart:
    """Read the part of a block that a member holds; `InvalidRequestError` if it is damaged."""

    def read(member: Member) -> ExportPart:
        part, payload = block_format.read(memoryview(member.content()), codec)
        if member.name != block_name(part):
            raise layout.damaged(f"{member.name} does not match its name")
        return ExportPart(part, payload)

    return parsed(member, layout, read)


def parsed(member: Member, layout: ArchiveLayout, parse: Callable[[Member], _T]) -> _T:
    """Parse a member; any error of its content becomes an `InvalidRequestError`."""
    try:
        return parse(member)
    except (CacheCorruptionError, CachePersistenceError) as error:
        raise layout.damaged(error.message) from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise layout.damaged(f"{member.name} is invalid: {place}: {first['msg']}") from error
    except ValueError as error:
        raise layout.damaged(f"{member.name} is invalid: {error}") from error
