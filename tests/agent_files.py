"""Files of agents as a stranger would change them: every checksum is right again."""

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
    """Names and contents, as Python's own reader finds them."""
    found = []
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found.append((member.name, file.read()))
    return found


def packed(files: Iterable[tuple[str, bytes]], signature: str | None = None) -> bytes:
    """An archive of members; the manifest is made anew if there is a signature for it."""
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
    """The same file with what `edit` makes of each member's kind and content."""
    *files, (_, manifest) = members(content)
    edited = [(name, edit(_KINDS[name.split("/")[0]], body)) for name, body in files]
    return packed(edited, json.loads(manifest)["hmac"])


def with_fields(kind: str, **fields: Any) -> Edit:
    """Put fields into the body of all members of a kind; `a__b` is a field within another."""

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
    """Put fields into all members of a kind, beside the body."""

    def edit(found: str, content: bytes) -> bytes:
        if found != kind:
            return content
        return json.dumps(json.loads(content) | fields).encode()

    return edit
