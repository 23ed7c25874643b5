import dataclasses
import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.ledger_json import (
    TurnBody,
    decode_agent,
    decode_tool,
    decode_turn,
    encode_agent,
    encode_tool,
    encode_turn,
)
from semantic.domain.agents import Agent, AgentProfile, Divergence, Overflow, Quota, Reuse
from semantic.domain.chat import (
    ImagePart,
    JsonObject,
    Message,
    Part,
    Role,
    ServiceClass,
    TextPart,
    ThinkingPart,
    ToolReferencePart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
    Usage,
)
from semantic.domain.sampling import FinishReason

pytestmark = pytest.mark.unit

# With halves of surrogate pairs, which JSON may carry and UTF-8 may not.
any_text = st.text(st.characters(exclude_categories=()))
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
any_object: st.SearchStrategy[JsonObject] = st.dictionaries(any_text, any_json, max_size=3)
text_parts = st.builds(TextPart, any_text)
images = st.builds(ImagePart, any_text, any_text)
references = st.builds(ToolReferencePart, any_text)
results = st.builds(
    ToolResultPart,
    any_text,
    st.lists(text_parts | images | references, max_size=3).map(tuple),
    st.booleans(),
)
any_part = (
    text_parts
    | images
    | results
    | st.builds(ThinkingPart, any_text, any_text, st.booleans())
    | st.builds(ToolUsePart, any_text, any_text, any_object)
)
any_message = st.builds(Message, st.sampled_from(Role), st.lists(any_part, max_size=4).map(tuple))
counts = st.integers(0, 2**53)
any_body = st.builds(
    TurnBody,
    st.lists(any_message, max_size=3).map(tuple),
    st.builds(Usage, counts, counts, counts, counts, counts),
    st.builds(Reuse, counts, counts, counts, counts),
    counts,
    any_text,
    counts,
    st.none() | st.builds(Divergence, any_text, counts),
    any_text,
    st.none() | st.sampled_from(FinishReason),
)
times = st.floats(0, 1e10)
any_tool = st.builds(ToolSpec, any_text, any_text, any_object, st.booleans(), st.booleans())
any_agent = st.builds(
    Agent,
    id=st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True),
    created_at=times,
    tenant=st.text(),
    head=st.none() | st.text(),
    num_turns=counts,
    last_used=times,
    weight=st.floats(0, exclude_min=True),
    service_class=st.sampled_from(ServiceClass),
    is_pinned=st.booleans(),
    ttl_s=st.none() | times,
    quota=st.builds(Quota, st.none() | counts, st.none() | counts),
    labels=st.lists(st.tuples(any_text, any_text), max_size=3).map(tuple),
    profile=st.builds(
        AgentProfile,
        st.none() | any_text,
        st.lists(any_tool, max_size=2).map(tuple),
        st.none() | any_text,
        st.sampled_from(Overflow),
    ),
)


def test_every_kind_of_part_is_among_those_tried() -> None:
    made = {TextPart, ImagePart, ThinkingPart, ToolUsePart, ToolResultPart}

    assert set(get_args(Part)) == made


@given(any_body)
def test_any_turn_comes_back_as_it_was(body: TurnBody) -> None:
    assert decode_turn(encode_turn(body)) == body


@given(any_agent)
def test_any_agent_comes_back_as_it_was(agent: Agent) -> None:
    assert decode_agent(agent.tenant, agent.id, encode_agent(agent)) == agent


@given(any_tool)
def test_any_tool_comes_back_as_it_was(tool: ToolSpec) -> None:
    assert decode_tool(encode_tool(tool)) == tool


@given(any_body)
def test_text_is_stored_as_text_unless_it_is_none(body: TurnBody) -> None:
    stored = encode_turn(body)

    if isinstance(stored, str):
        stored.encode()
    else:
        with pytest.raises(UnicodeDecodeError):
            stored.decode()


def test_the_stored_form_of_a_turn_stays_what_it_is() -> None:
    call = ToolUsePart("c1", "read", {"path": "a.py"})
    result = ToolResultPart("c1", (TextPart("ä"), ToolReferencePart("grep")), is_error=True)
    body = TurnBody(
        (Message(Role.ASSISTANT, (call,)), Message(Role.TOOL, (result,))),
        Usage(7, 2),
        Reuse(hot=5, computed=2),
        num_messages=2,
        digest="d1",
        num_dropped=1,
        divergence=Divergence("t0", 3),
        model="m",
        reason=FinishReason.TOOL_USE,
    )

    stored = encode_turn(body)

    assert isinstance(stored, str)
    assert json.loads(stored) == {
        "messages": [
            {
                "role": "assistant",
                "parts": [
                    {"type": "tool_use", "id": "c1", "name": "read", "arguments": {"path": "a.py"}}
                ],
            },
            {
                "role": "tool",
                "parts": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [
                            {"type": "text", "text": "ä"},
                            {"type": "tool_reference", "tool_name": "grep"},
                        ],
                        "is_error": True,
                    }
                ],
            },
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "cache_read_tokens": 0,
            "cache_creation_tokens": 0,
            "thinking_tokens": 0,
        },
        "reuse": {"hot": 5, "pool": 0, "disk": 0, "computed": 2},
        "num_messages": 2,
        "digest": "d1",
        "num_dropped": 1,
        "divergence": {"turn_id": "t0", "index": 3},
        "model": "m",
        "reason": "tool_use",
    }
    assert "ä" in stored


def test_fields_with_defaults_may_be_absent() -> None:
    said = '{"role":"user","parts":[{"type":"thinking","text":"hm"}]}'
    turn = f'{{"messages":[{said}],"usage":{{"prompt_tokens":1}}}}'

    assert decode_turn(turn) == TurnBody(
        (Message(Role.USER, (ThinkingPart("hm"),)),), Usage(1), Reuse()
    )
    assert decode_agent("local", "coder", '{"created_at":2.0}') == Agent("coder", 2.0)
    assert decode_agent("local", "coder", '{"created_at":2.0,"profile":{"system":"s"}}') == Agent(
        "coder", 2.0, profile=AgentProfile("s")
    )


@given(any_agent, any_object)
def test_unknown_keys_are_passed_over(agent: Agent, extra: JsonObject) -> None:
    stored = encode_agent(agent)
    text = stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")
    known = {field.name for field in dataclasses.fields(Agent)}
    more = {key: value for key, value in extra.items() if key not in known} | {"mood": "good"}

    assert decode_agent(agent.tenant, agent.id, json.dumps(more | json.loads(text))) == agent


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"messages":[],"usage":{}}',
        '{"messages":[{"role":"nobody","parts":[]}],"usage":{"prompt_tokens":1}}',
        '{"messages":[{"role":"user","parts":[{"type":"smell"}]}],"usage":{"prompt_tokens":1}}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_turn_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="this is not a turn"):
        decode_turn(text)


def test_an_agent_that_could_not_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="this is not an agent"):
        decode_agent("local", "coder", '{"created_at":1.0,"weight":-1}')
