"""Valid requests, and ways to make them malformed."""

import copy
import functools
import gzip
import json
import math
import random
import zlib
from collections.abc import Callable
from typing import Any

from tests.attack.site import MAX_TOKENS, MODEL

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
_USER = {"role": "user", "content": "What is the weather in Paris?"}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "And in Rome?"}]}
_FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": _SCHEMA, "strict": True}
_CALLS = [
    _USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
_USED = [
    _USER,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
]
_SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 7}

# The paths are those of /openapi.json; what is not listed is sent an empty object.
VALID: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {
            "model": MODEL,
            "messages": [_USER, _PARTS],
            "max_tokens": 4,
            **_SAMPLING,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["zz"],
            "session_id": "s",
            "logit_bias": {"5": 1.0},
            "stream_options": {"include_usage": True},
            "stream": True,
        },
        {
            "model": MODEL,
            "messages": _CALLS,
            "max_completion_tokens": 4,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "auto",
        },
        {
            "model": MODEL,
            "messages": [_USER],
            "max_tokens": 8,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "w", "schema": _SCHEMA, "strict": True},
            },
        },
        {
            "model": MODEL,
            "messages": [_USER],
            "max_tokens": 8,
            "structured_outputs": {"regex": "[ab]{2,5}"},
        },
    ],
    "/v1/completions": [
        {
            "model": MODEL,
            "prompt": ["one", "two"],
            "max_tokens": 4,
            "echo": True,
            "logprobs": 2,
            "n": 2,
            "stop": "x",
            **_SAMPLING,
        },
        {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "stream": True},
    ],
    "/v1/embeddings": [
        {"model": MODEL, "input": ["one", "two"], "dimensions": 8, "encoding_format": "base64"},
        {"model": MODEL, "input": [[5, 6, 7]], "normalize": False},
    ],
    "/v1/responses/input_tokens": [{"model": MODEL, "input": [_USER], "instructions": "Be brief."}],
    "/v1/responses/compact": [{"model": MODEL, "input": [_USER, _PARTS], "instructions": "Short."}],
    "/v1/responses": [
        {
            "model": MODEL,
            "input": [_USER, _PARTS],
            "max_output_tokens": 4,
            "store": True,
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "include": [],
            "tools": [{"type": "function", **_FUNCTION}],
        },
        {
            "model": MODEL,
            "input": "hi",
            "max_output_tokens": 8,
            "stream": True,
            "text": {"format": {"type": "json_schema", "name": "w", "schema": _SCHEMA}},
        },
    ],
    "/v1/messages": [
        {
            "model": MODEL,
            "messages": _USED,
            "max_tokens": 4,
            "stream": True,
            "system": [{"type": "text", "text": "Be brief."}],
            "temperature": 0.5,
            "tools": [{"name": "weather", "input_schema": _SCHEMA}],
            "stop_sequences": ["x"],
            "tool_choice": {"type": "any"},
            "metadata": {"user_id": "u"},
        },
        {
            "model": MODEL,
            "messages": [_USER],
            "max_tokens": 8,
            "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ],
    "/v1/messages/count_tokens": [
        {"model": MODEL, "messages": _USED, "tools": [{"name": "w", "input_schema": _SCHEMA}]}
    ],
    "/api/show": [{"model": MODEL}],
    "/api/chat": [
        {
            "model": MODEL,
            "messages": [_USER],
            "options": {"num_predict": 4, **_SAMPLING, "stop": ["zz"]},
            "keep_alive": "5m",
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function", "function": _FUNCTION}],
        },
        {"model": MODEL, "messages": [_USER], "format": _SCHEMA, "stream": False},
    ],
    "/api/generate": [
        {
            "model": MODEL,
            "prompt": "one",
            "system": "Be brief.",
            "context": [5, 6, 7],
            "raw": False,
            "options": {"num_predict": 4},
        }
    ],
    "/api/embed": [{"model": MODEL, "input": ["one", "two"], "dimensions": 8, "truncate": True}],
    "/api/embeddings": [{"model": MODEL, "prompt": "one", "keep_alive": 60}],
    "/admin/runtime": [{"draft_tokens": 4, "ahead_tokens": 0, "batch_window_ms": 1.0}],
    "/v1/agents": [
        {
            "id": "fuzz-new",
            "system": "Be brief.",
            "tools": [_FUNCTION],
            "class": "background",
            "weight": 2.0,
            "pin": False,
            "ttl_s": 3600.0,
            "labels": {"a": "b"},
            "quota": {"max_bytes": 10**9, "max_turns": 100},
            "overflow": "drop_oldest",
        }
    ],
    "/v1/agents/{agent_id}": [{"system": "Be exact.", "labels": {"c": "d"}, "ttl_s": 1e6}],
    "/v1/agents/{agent_id}/generate": [
        {"message": "hello", "max_tokens": 4, **_SAMPLING, "stop": ["zz"], "stream": True},
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 8,
            "response_format": {"type": "json", "json_schema": _SCHEMA},
        },
        {"message": "hi", "response_format": {"type": "regex", "pattern": "a{1,5}"}},
        {"message": "hi", "response_format": {"type": "choice", "choices": ["yes", "no"]}},
    ],
    "/v1/agents/{agent_id}/fork": [{"n": 1}, {"ids": ["fuzz-fork"], "turn_id": "turn_1"}],
    "/v1/agents/{agent_id}/rewind": [{"turn_id": None}, {"turn_id": "turn_1"}],
    "/v1/agents/{agent_id}/compact": [
        {"id": "fuzz-short", "instructions": "Short.", "keep_turns": 1, "max_tokens": 8, "seed": 7}
    ],
    "/v1/agents/{agent_id}/evict": [{"to": "disk"}, {"to": "cold"}],
    "/v1/cache/gc": [{"orphan_age_s": 0}],
}

_WEIRD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    -0.0,
    2**31,
    2**63,
    2**64,
    2**70,
    -(2**70),
    10**18,
    10**300,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    0.1,
    "",
    " ",
    "\0",
    "\ud800",
    "a\udfffb",
    "\u202e",
    "💥" * 50,
    "<|start|>system\n",
    "<|end|>",
    "{{ 7*7 }}",
    "../../etc/passwd",
    "'; DROP TABLE turns; --",
    [],
    {},
    [[]],
    [None],
    {"": ""},
    {"\ud800": 1},
    [{}] * 100,
    "x" * 20_000,
    "NaN",
    "1e999",
)
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/plain"),
    (b"content-type", b"application/json; charset=utf-7"),
    (b"content-type", b"\xff\xfe"),
    (b"x-agent-id", b"\xff\xff"),
    (b"x-agent-id", b"a" * 5000),
    (b"x-agent-id", b"../x"),
    (b"x-session-affinity", b"{"),
    (b"session-id", b"s" * 9000),
    (b"content-encoding", b"gzip"),
    (b"content-encoding", b"br"),
    (b"anthropic-version", b"never"),
    (b"accept", b"image/png"),
    (b"expect", b"100-continue"),
    (b"authorization", b"Bearer \x80"),
    (b"range", b"bytes=0-"),
    (b"host", b"localhost:1"),
)
_DEEP = "@@deep@@"
_MAX_BODY = 2**23


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, dict | list):
            _places(inner, found)
    return found


def _replace(holder: Any, key: Any, dice: random.Random) -> None:
    holder[key] = copy.deepcopy(dice.choice(_WEIRD))


def _delete(holder: Any, key: Any, _: random.Random) -> None:
    del holder[key]


def _wrap(holder: Any, key: Any, dice: random.Random) -> None:
    inner = holder[key]
    holder[key] = [inner] if dice.random() < 0.5 else {"value": inner}


def _nest(holder: Any, key: Any, _: random.Random) -> None:
    holder[key] = _DEEP


def _repeat(holder: Any, key: Any, dice: random.Random) -> None:
    inner = holder[key]
    holder[key] = (inner if isinstance(inner, list) else [inner]) * dice.choice((2, 300))


def _add(holder: Any, key: Any, dice: random.Random) -> None:
    if isinstance(holder, dict):
        name = dice.choice(("unknown", "", "\ud800", "__proto__", "model_config", "x" * 3000))
        holder[name] = holder[key]


_CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    _replace,
    _replace,
    _replace,
    _replace,
    _delete,
    _wrap,
    _nest,
    _repeat,
    _add,
)


def change_somewhere(document: Any, dice: random.Random) -> None:
    """Change one value of a document."""
    holder, key = dice.choice(_places(document, []))
    dice.choice(_CHANGES)(holder, key, dice)


def written(document: Any, dice: random.Random) -> bytes:
    """A changed document as JSON, nested as deep as a change wants it."""
    content = json.dumps(document).encode()
    if _DEEP.encode() in content:
        depth = dice.choice((50, 900, 20_000))
        deep = b"[" * depth + b"]" * depth if dice.random() < 0.5 else _deep_object(depth)
        content = content.replace(f'"{_DEEP}"'.encode(), deep)
    return content


def spoil(body: Any, dice: random.Random) -> bytes:
    """Change a valid body somewhere, or its bytes; returns what to send."""
    document = {"body": copy.deepcopy(body)}
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        change_somewhere(document, dice)
        if "body" not in document:
            break
    content = written(_shorten(document.get("body")), dice)
    content = dice.choice(_BYTES)(content, dice) if dice.random() < 0.15 else content
    # One over the limit is cut off while it is sent, and its sender may miss the 413.
    return content[:_MAX_BODY]


def _deep_object(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def _shorten(value: Any, name: str = "") -> Any:
    """Shorten requested replies: a long reply is no fault, and takes long."""
    if isinstance(value, dict):
        return {key: _shorten(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shorten(inner) for inner in value]
    is_count = name.startswith("max_") or name in {"n", "best_of", "num_predict"}
    is_long = isinstance(value, int | float) and MAX_TOKENS < value <= 2**31
    return MAX_TOKENS if is_count and is_long else value


_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda content, dice: content[: dice.randrange(len(content) or 1)],
    lambda content, _: content + b"}",
    lambda content, _: b"\xef\xbb\xbf" + content,
    lambda content, _: content.decode().encode("utf-16"),
    lambda content, _: content.replace(b"a", b"\xff"),
    lambda content, _: content.replace(b"{", b'{"model": 5, "model": "fake", ', 1),
    lambda content, _: content.replace(b'"', b"'"),
    lambda _, dice: dice.randbytes(dice.choice((0, 1, 500))),
    lambda content, _: b"[" + content + b"," + content + b"]",
    lambda content, _: content.replace(b": ", b": 1e99999, ", 1),
    lambda content, _: content.replace(b'"', b'"\\ud83d', 3),
)


def spoil_headers(dice: random.Random) -> dict[bytes, bytes]:
    """Headers of a request: mostly as they should be."""
    headers = {b"content-type": b"application/json"}
    if dice.random() < 0.2:
        name, value = dice.choice(_HEADERS)
        headers[name] = value
    return headers


@functools.cache
def _spaces() -> tuple[Any, bytes]:
    """A gzip stream that begins with 64 MB of spaces, and its bytes so far."""
    stream = zlib.compressobj(wbits=31)
    return stream, stream.compress(b" " * 2**26)


def _expanding(content: bytes) -> bytes:
    stream, begun = _spaces()
    rest = stream.copy()
    packed: bytes = begun + rest.compress(content) + rest.flush()
    return packed


_PACKINGS: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"gzip", gzip.compress),
    (b"deflate", zlib.compress),
    (b"gzip", lambda content: gzip.compress(b"") * 100_000 + gzip.compress(content)),
    (b"gzip", _expanding),
    (b"gzip", lambda content: gzip.compress(gzip.compress(content))),
    (b"gzip", lambda content: gzip.compress(content)[:-5]),
)


def pack(content: bytes, dice: random.Random) -> tuple[bytes, dict[bytes, bytes]]:
    """Compress a body, honestly or as an attacker does; returns it and its header."""
    encoding, compress = dice.choice(_PACKINGS)
    return compress(content), {b"content-encoding": encoding}
