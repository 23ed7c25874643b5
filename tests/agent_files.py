"""Edits exported agent files as an attacker would: with all checksums recomputed."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterable
from typing import Any

from semantic.adapters.outbound.blocks.agent_archive import compose_manifest

Edit = Callable[[str, bytes], bytes]
_KINDS = {"agent.json": "agent", "turns": "turn", "blocks": "block", "manifest.json": "manifest"}


def members(content: bytes) -> list[tuple[str, bytes]]:
    """The names and contents of an archive's members, read by `tarfile`."""
    found = []
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found.append((member.name, file.read()))
    return found


def packed(files: Iterable[tuple[str, bytes]], signature: str | None = None) -> bytes:
    """Pack members into an archive; with a signature, adds a manifest that contains it."""
    files = list(files)
    if signature is not None:
        digests = {name: hashlib.sha256(body).hexdigest() for name, body in files}
        files.append(("manifest.json", compose_manifest(digests, signature)))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, body in files:
            header = tarfile.TarInfo(name)
            header.size = len(body)
            archive.addfile(header, io.BytesIO(body))
    return out.getvalue()


def changed(content: bytes, edit: Edit) -> bytes:
    """Apply `edit` to every member (kind, content); keeps the signature of the manifest."""
    *files, (_, manifest) = members(content)
    edited = [(name, edit(_KINDS[name.split("/")[0]], body)) for name, body in files]
    return packed(edited, json.loads(manifest)["hmac"])


def with_fields(kind: str, **fields: Any) -> Edit:
    """Set fields in the body of all members of a kind; `a__b` is the field b within a."""

    def edit(found: str, content: bytes) -> bytes:
        if found != kind:
            return content
        document = json.loads(content)
        for name, value in fields.items():
            *path, last = name.split("__")
            place = document["body"]
            for step in path:
                place = place[step]
            place[last] = value
        return json.dumps(document).encode()

    return edit


def with_member_fields(kind: str, **fields: Any) -> Edit:
    """Set fields of all members of a kind, outside the body."""

    def edit(found: str, content: bytes) -> bytes:
        if found != kind:
            return content
        return json.dumps(json.loads(content) | fields).encode()

    return edit
