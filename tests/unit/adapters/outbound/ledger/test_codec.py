import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.outbound.ledger.codec import (
    TurnBody,
    decode_agent,
    decode_turn,
    encode_agent,
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
)
from semantic.domain.events import CacheMiss, MissReason, ReplyTiming, Usage
from semantic.domain.sampling import FinishReason

pytestmark = pytest.mark.unit

any_text = st.text()
any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
any_object: st.SearchStrategy[JsonObject] = st.dictionaries(any_text, any_json, max_size=3)
text_parts = st.builds(TextPart, any_text)
sizes = st.integers(0, 2**31)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
images = st.builds(ImagePart, digests, any_text, sizes, sizes)
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
tool_names = st.from_regex(r"[A-Za-z0-9_.-]{1,128}", fullmatch=True)
any_tool = st.builds(ToolSpec, tool_names, any_text, any_object, st.booleans(), st.booleans())
any_agent = st.builds(
    Agent,
    id=st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True),
    created_at=times,
    tenant=st.text(),
    head=st.none() | st.text(),
    num_turns=counts,
    last_used=times,
    weight=st.floats(0, 1000, exclude_min=True),
    service_class=st.sampled_from(ServiceClass),
    is_pinned=st.booleans(),
    ttl_s=st.none() | st.floats(0, 1e10, exclude_min=True),
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


def test_every_kind_of_part_is_tried() -> None:
    made = {TextPart, ImagePart, ThinkingPart, ToolUsePart, ToolResultPart}

    assert set(get_args(Part)) == made


@given(any_body)
def test_any_turn_comes_back_as_it_was(body: TurnBody) -> None:
    assert decode_turn(encode_turn(body)) == body


@given(any_agent)
def test_any_agent_comes_back_as_it_was(agent: Agent) -> None:
    assert decode_agent(agent.tenant, agent.id, encode_agent(agent)) == agent


def test_values_without_a_json_form_are_stored_as_the_nearest_one() -> None:
    half, number = "half \ud800", float("nan")
    call = ToolUsePart("c1", "read", {half: [half, number, float("inf")]})
    body = TurnBody((Message(Role.USER, (TextPart(half), call)),), Usage(1))

    stored = encode_turn(body)

    stored.encode()
    assert decode_turn(stored, is_foreign=True).messages[0].parts == (
        TextPart("half ?"),
        ToolUsePart("c1", "read", {"half ?": ["half ?", None, None]}),
    )


def test_rows_of_older_servers_may_hold_it() -> None:
    said = '{"messages":[{"role":"user","parts":[{"type":"text","text":"half \ud800"}]}],'
    row = (said + '"usage":{"prompt_tokens":1}}').encode("utf-8", "surrogatepass")

    assert decode_turn(row).messages == (Message.of(Role.USER, "half ?"),)
    with pytest.raises(ValueError, match="half a surrogate pair"):
        decode_turn(row, is_foreign=True)


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
        num_summarised=4,
        divergence=Divergence("t0", 3),
        model="m",
        reason=FinishReason.TOOL_USE,
        num_head=4,
    )

    stored = encode_turn(body)

    golden = Path(__file__).parents[4] / "golden" / "turn.json"
    assert json.loads(stored) == json.loads(golden.read_text())
    assert "ä" in stored


def test_tools_and_the_reason_of_a_miss_are_stored() -> None:
    miss = CacheMiss(MissReason.TOOLS_CHANGED, 7, "1 tool added", ("grep",))
    body = TurnBody((), Usage(1), tools=(("grep", "d1"),), is_thinking=False, miss=miss)
    body = dataclasses.replace(body, timing=ReplyTiming(0.25, 1.5))
    assert decode_turn(encode_turn(body), is_foreign=True) == body
    plain = json.loads(encode_turn(TurnBody((), Usage(1))))
    assert not {"tools", "is_thinking", "miss", "timing"} & plain.keys()


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
    text = encode_agent(agent)
    known = {field.name for field in dataclasses.fields(Agent)}
    more = {key: value for key, value in extra.items() if key not in known} | {"mood": "good"}

    assert decode_agent(agent.tenant, agent.id, json.dumps(more | json.loads(text))) == agent


def nested(depth: int) -> JsonObject:
    value: JsonObject = {}
    for _ in range(depth):
        value = {"a": value}
    return value


WRONG_SETTINGS: dict[str, JsonObject] = {
    "no weight": {"weight": -1},
    "weight beyond the API's": {"weight": 1001},
    "labels that are no text": {"labels": [["a", {"x": 1}]]},
    "labels of three": {"labels": [["a", "b", "c"]]},
    "long labels": {"labels": [["a", "b" * 257]]},
    "many labels": {"labels": [[str(i), ""] for i in range(65)]},
    "labels as an object": {"labels": {"a": "b"}},
    "text for a time": {"ttl_s": "abc"},
    "a flag for a time": {"ttl_s": True},
    "no time": {"ttl_s": 0},
    "a time without end": {"ttl_s": 1e11},
    "a count beyond the ledger's": {"quota": {"max_turns": 2**70}},
    "a negative count": {"num_turns": -1},
    "a number for a flag": {"is_pinned": 1},
    "a number for text": {"profile": {"system": 1}},
    "an unknown class": {"service_class": "vip"},
    "a list for an object": {"profile": []},
    "a tool with a bad name": {
        "profile": {"tools": [{"name": "a b", "description": "", "parameters": {}}]}
    },
    "a tool without a schema": {
        "profile": {"tools": [{"name": "a", "description": "", "parameters": []}]}
    },
    "a deep schema": {
        "profile": {"tools": [{"name": "a", "description": "", "parameters": nested(200)}]}
    },
    "many tools": {
        "profile": {"tools": [{"name": "a", "description": "", "parameters": {}}] * 1025}
    },
}


@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("wrong", WRONG_SETTINGS)
def test_an_agent_beyond_the_limits_is_refused(wrong: str, *, is_foreign: bool) -> None:
    stored = json.dumps({"created_at": 1.0} | WRONG_SETTINGS[wrong])
    with pytest.raises(ValueError, match="this is not an agent"):
        decode_agent("local", "coder", stored, is_foreign=is_foreign)


def saying(part: str, role: str = "user") -> str:
    """A turn in which this was said."""
    said = f'{{"role":"{role}","parts":[{part}]}}'
    return f'{{"messages":[{said}],"usage":{{"prompt_tokens":1}}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        b"\xff\xfe",
        '{"messages":[],"usage":{}}',
        saying("", role="nobody"),
        saying('{"type":"smell"}'),
        saying('{"type":"text","text":1}'),
        saying('{"type":"text"}'),
        saying('{"type":"tool_use","id":"c","name":"n","arguments":[]}'),
        saying('{"type":"tool_result","tool_use_id":"c","content":[{"type":"tool_result"}]}'),
        saying('{"type":"tool_result","tool_use_id":"c","content":"text"}'),
        saying('{"type":"tool_reference","tool_name":"n"}'),
        saying('"text"'),
        saying("null"),
    ],
)
def test_what_is_no_turn_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="this is not a turn"):
        decode_turn(text)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", '"\\ud800"', "[" * 200 + "]" * 200])
def test_what_every_parser_refuses_is_refused_from_strangers(value: str) -> None:
    text = saying(f'{{"type":"tool_use","id":"c","name":"n","arguments":{{"a":{value}}}}}')

    decode_turn(text)  # of our own ledger it is taken
    with pytest.raises(ValueError, match="this is not a turn"):
        decode_turn(text, is_foreign=True)
