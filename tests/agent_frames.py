"""Files of agents as a stranger would change them: every checksum is right again."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

Edit = Callable[[str, bytes], bytes]


def changed(content: bytes, edit: Edit) -> bytes:
    """The same file with what `edit` makes of each frame's kind and content."""
    magic, rest = content.split(b"\n", 1)
    out, whole, num_frames = magic + b"\n", hashlib.sha256(), 0
    while rest:
        line, rest = rest.split(b"\n", 1)
        head = json.loads(line)
        body, rest = rest[: head["nbytes"]], rest[head["nbytes"] :]
        if head["kind"] == "end":
            end = json.loads(body) | {"num_frames": num_frames, "sha256": whole.hexdigest()}
            body = json.dumps(end).encode()
        else:
            body = edit(head["kind"], body)
        digest = hashlib.sha256(body).hexdigest()
        frame = {"kind": head["kind"], "nbytes": len(body), "sha256": digest}
        line = json.dumps(frame).encode() + b"\n"
        whole.update(line)
        num_frames += 1
        out += line + body
    return out


def with_fields(kind: str, **fields: Any) -> Edit:
    """Put fields into the body of all frames of a kind; a dotted name is one within another."""

    def edit(found: str, content: bytes) -> bytes:
        if found != kind:
            return content
        frame = json.loads(content)
        body = json.loads(frame["body"])
        for name, value in fields.items():
            *path, last = name.split("__")
            place = body
            for step in path:
                place = place[step]
            place[last] = value
        frame["body"] = json.dumps(body)
        return json.dumps(frame).encode()

    return edit


def with_frame_fields(kind: str, **fields: Any) -> Edit:
    """Put fields into all frames of a kind, beside the body."""

    def edit(found: str, content: bytes) -> bytes:
        if found != kind:
            return content
        return json.dumps(json.loads(content) | fields).encode()

    return edit
