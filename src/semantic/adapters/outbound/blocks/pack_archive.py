"""A cache pack as one file: a tar archive like that of an agent, with an Ed25519 signature.

    pack.json  blocks/<name>.<kind>.safetensors …  manifest.json

`docs/packs.md` describes the format. A file has no messages and no turns: nothing of a
conversation but the tokens of its system prompt and tools. All content is checked before use.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, assert_never

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from semantic.adapters.outbound.blocks import archive
from semantic.adapters.outbound.blocks.archive import ArchiveLayout, Member
from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.adapters.outbound.blocks.pack_keys import PackKeys
from semantic.adapters.outbound.blocks.quantisation import FLOATS, FloatFormat
from semantic.ports.backend import HostBuffer, KVPayload
from semantic.ports.packs import PackHead, PackItem, PackSigner
from semantic.ports.storage import ExportPart

FORMAT: Final = "semantic-pack/1"
LAYOUT: Final = ArchiveLayout(FORMAT, "pack", {"pack": r"pack\.json", "block": archive.BLOCK_NAMES})
# The largest deviation, as a share of the largest number in a buffer. Other CPUs and batch shapes
# add up in another order; in low precision, rounding errors grow from layer to layer.
_TOLERANCES: Final = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
_QUANTISED: Final = {"raw": 0.0, "q8g64": 5e-2, "q4g64": 4e-1}

_Line = Annotated[str, Field(max_length=1024)]


class PackFile:
    """`PackFilePort` with KV cache in the precision of block files."""

    def __init__(self, codec: KVCodec, keys: PackKeys) -> None:
        self._codec = codec
        self._keys = keys

    def write(self, items: Iterable[PackItem]) -> Iterator[bytes]:
        public = self._keys.public  # a missing key is an error before any piece

        def manifest_of(digests: Mapping[str, str]) -> bytes:
            signature = self._keys.sign(archive.signed_text(FORMAT, digests))
            return compose_manifest(digests, public, signature)

        return archive.compose_archive(self._members(items), manifest_of)

    def _members(self, items: Iterable[PackItem]) -> Iterator[tuple[str, list[bytes]]]:
        fingerprint = ""
        for item in items:
            match item:
                case PackHead():
                    fingerprint = item.fingerprint
                    yield "pack.json", [json.dumps(dataclasses.asdict(item)).encode()]
                case ExportPart():
                    pieces = archive.block_pieces(item, self._codec, fingerprint)
                    yield archive.block_name(item.part), pieces
                case _:
                    assert_never(item)

    def check(self, pieces: Iterable[bytes]) -> PackSigner:
        found: list[PackSigner] = []

        def read_manifest(manifest: Member, digests: Mapping[str, str]) -> str:
            found.append(self._signer(manifest, digests))
            return found[0].key

        archive.check(archive.read_members(pieces, LAYOUT), LAYOUT, read_manifest)
        return found[0]

    def read(self, pieces: Iterable[bytes], *, has_parts: bool) -> Iterator[PackItem]:
        members = archive.JsonReader(LAYOUT)
        for member in archive.read_members(pieces, LAYOUT):
            if member.kind == "pack":
                yield archive.parsed(member, LAYOUT, lambda m: _read_head(members.parse(m)))
            elif member.kind == "block" and has_parts:
                yield archive.read_part(member, self._codec, LAYOUT)

    def _signer(self, manifest: Member, digests: Mapping[str, str]) -> PackSigner:
        content = manifest.content()
        match archive.JsonReader(LAYOUT).parse_content(manifest.name, content):
            case {"key": str(key), "ed25519": str(signature)}:
                if content == compose_manifest(digests, key, signature):
                    signed = archive.signed_text(FORMAT, digests)
                    if (signer := self._keys.signer(signed, key, signature)) is not None:
                        return signer
                    raise LAYOUT.damaged("its signature is not that of the key it names")
        raise LAYOUT.damaged("its manifest does not match its members")

    def compare(self, stored: KVPayload, computed: KVPayload) -> str:
        if (stored.kind, stored.start, stored.end) != (computed.kind, computed.start, computed.end):
            return "it covers other positions"
        names = [buffer.name for buffer in computed.buffers]
        if [buffer.name for buffer in stored.buffers] != names:
            return "it has other layers"
        for ours, theirs in zip(computed.buffers, stored.buffers, strict=True):
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                return f"{ours.name} has another shape or dtype"
            if difference := self._difference(ours, theirs):
                return f"{ours.name} {difference}"
        return ""

    def _difference(self, computed: HostBuffer, stored: HostBuffer) -> str:
        if bytes(computed.data) == bytes(stored.data):
            return ""
        floats = FLOATS.get(computed.dtype)
        if floats is None:
            return "has other values"
        ours, theirs = (_singles(buffer, floats) for buffer in (computed, stored))
        allowed = _TOLERANCES[computed.dtype] + _QUANTISED[self._codec.kv_format]
        with np.errstate(all="ignore"):  # NaN and infinity fail the comparison below
            found = float(np.abs(ours - theirs).max() / np.abs(ours).max())
        if found <= allowed:
            return ""
        return f"deviates by {found:.2g} of its largest value; {allowed:.2g} is allowed"


def _singles(buffer: HostBuffer, floats: FloatFormat) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return floats.widened(np.frombuffer(buffer.data, floats.array))


def compose_manifest(digests: Mapping[str, str], key: str, signature: str) -> bytes:
    """Write the manifest: the SHA-256 of all other members, the public key and the signature."""
    return archive.compose_manifest(FORMAT, digests, {"key": key, "ed25519": signature})


class _HeadMember(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    name: _Line
    model: _Line
    fingerprint: _Line
    abi: _Line
    kv_format: _Line
    num_tokens: Annotated[int, Field(ge=1, le=2**31)]
    text: str
    created_at: Annotated[float, Field(ge=0)]


def _read_head(content: object) -> PackHead:
    return PackHead(**_HeadMember.model_validate(content).model_dump())
