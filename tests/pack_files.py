"""Edits cache packs as a forger would: with all checksums and the signature of a key of its own."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.adapters.outbound.blocks.pack_archive import PackFile
from semantic.adapters.outbound.blocks.pack_keys import PackKeys
from semantic.domain.blocks import BlockName, block_name, pack_tokens, unpack_tokens
from semantic.ports.packs import PackHead, PackItem
from semantic.ports.storage import ExportPart

Change = Callable[[list[PackItem]], Iterable[PackItem]]


def keys_of(home: Path) -> PackKeys:
    """The keys in a server's home directory."""
    return PackKeys(home / "pack.key", home / "pack_keys")


def forged(content: bytes, keys: PackKeys, change: Change) -> bytes:
    """The pack with other items, signed with these keys."""
    file = PackFile(KVCodec(), keys)
    items = list(file.read([content], has_parts=True))
    return b"".join(file.write(change(items)))


def with_head(**fields: object) -> Change:
    """Set fields of the head."""

    def change(items: list[PackItem]) -> Iterator[PackItem]:
        for item in items:
            yield replace(item, **fields) if isinstance(item, PackHead) else item  # type: ignore[arg-type]

    return change


def with_altered_block(index: int) -> Change:
    """Alter one number of the KV cache of a block; -1 is the last."""

    def change(items: list[PackItem]) -> Iterator[PackItem]:
        victim = [item for item in items if isinstance(item, ExportPart)][index]
        for item in items:
            yield _altered(item) if isinstance(item, ExportPart) and item is victim else item

    return change


def _altered(item: ExportPart) -> ExportPart:
    first, *others = item.payload.buffers
    data = bytearray(first.data)
    data[-1] ^= 0x40  # the exponent of the last number, or a high bit of an integer
    buffers = (replace(first, source=bytes(data)), *others)
    return replace(item, payload=replace(item.payload, buffers=buffers))


def with_tokens(change_token: Callable[[int], int]) -> Change:
    """Replace the tokens of all blocks; names follow, and the KV cache stays that of the others."""

    def change(items: list[PackItem]) -> Iterator[PackItem]:
        parent: BlockName | None = None
        names: dict[BlockName, tuple[BlockName, BlockName]] = {}
        for item in items:
            if not isinstance(item, ExportPart):
                yield item
                continue
            part = item.part
            tokens = tuple(map(change_token, unpack_tokens(part.tokens)))
            if part.name not in names:
                before = part.parent if parent is None else parent
                parent = block_name(before, tokens)
                names[part.name] = before, parent
            before, name = names[part.name]
            made = replace(part, name=name, parent=before, tokens=pack_tokens(tokens))
            yield replace(item, part=made)

    return change


def without_block(index: int) -> Change:
    """Leave one block out."""

    def change(items: list[PackItem]) -> Iterator[PackItem]:
        victim = [item for item in items if isinstance(item, ExportPart)][index].part.name
        for item in items:
            if not (isinstance(item, ExportPart) and item.part.name == victim):
                yield item

    return change
