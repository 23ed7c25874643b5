"""Replies as the chat templates of published models write them: parsed, enforced and replayed."""

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from semantic.adapters.outbound.grammar.compiler import shape_grammar
from semantic.adapters.outbound.grammar.vocabulary import TokenTable, Vocabulary
from semantic.application.parsing import ReplyParser, fold_message
from semantic.application.prompt.compose import calls_text
from semantic.application.prompt.format_probe import probe_reply_format
from semantic.application.prompt.renderer import Renderer
from semantic.application.prompt.replay import (
    ReplayStore,
    TenantReplays,
    keys_to_remember,
    prompt_digest,
)
from semantic.application.prompt.template_probe import TemplateTraits, probe
from semantic.domain.chat import (
    ChatRequest,
    JsonObject,
    JsonValue,
    Message,
    Role,
    ToolChoice,
    ToolMode,
    ToolSpec,
    ToolUsePart,
)
from semantic.domain.events import Finished, TextDelta, Usage
from semantic.domain.reply_format import (
    HARMONY,
    SLOT,
    ArgumentStyle,
    CallNotation,
    ReplyFormat,
    ReplyShape,
)
from semantic.domain.sampling import FinishReason
from tests.conversations import results, text_result
from tests.template_rig import PUBLISHED, TemplateTokenizer

pytestmark = pytest.mark.integration

WEATHER = ToolSpec(
    "get_weather",
    "The weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "A city."},
            "days": {"type": "integer", "description": "Days."},
        },
        "required": ["city", "days"],
    },
    is_strict=True,
)
SEND = replace(WEATHER, name="send_message")
TOOLS = (WEATHER, SEND)
CALLS: tuple[tuple[str, JsonObject], ...] = (
    ("get_weather", {"city": "Zürich <b> & {x}", "days": 2}),
    ("send_message", {"city": 'Say "hi", </b>', "days": -14}),
)
WEATHER_ASKED = Message.of(Role.USER, "What is the weather?")
# These templates drop the end of the generation prompt from later turns: the prompt before a reply
# changes, and the reply cannot be replayed.
CHANGED = ("Command R+", "DeepSeek R1 distilled", "DeepSeek V3.2", "Gemma 4", "Nemotron Nano 2")
# The templates of these models write no calls: the models' documentation shows the notation.
UNWRITTEN = ("Granite 3.3", "LFM2", "Phi-4-mini", "SmolLM3", "SmolLM3, template by Unsloth")


def format_of(name: str) -> ReplyFormat:
    if name not in _FORMATS:
        _FORMATS[name] = probe_reply_format(PUBLISHED[name].tokenizer)
    return _FORMATS[name]


_FORMATS: dict[str, ReplyFormat] = {}


@cache
def traits_of(name: str) -> TemplateTraits:
    return probe(PUBLISHED[name].tokenizer)


def num_calls(name: str) -> int:
    return 2 if format_of(name).tools.is_parallel and name != "GPT-OSS" else 1


def written(name: str, num: int) -> str:
    """A reply with calls as the template writes it, from the first marker on."""
    if name in UNWRITTEN:
        return calls_text(CALLS[:num], format_of(name).tools)
    tokenizer, opener = PUBLISHED[name].tokenizer, format_of(name).tools.opener or '{"name"'
    if name == "GPT-OSS":
        opener = " to=functions"
    as_text = traits_of(name).wants_json_text
    given = [(n, json.dumps(a, ensure_ascii=False) if as_text else a) for n, a in CALLS[:num]]
    calls: list[JsonValue] = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(given)
    ]
    asked: JsonObject = {"role": "user", "content": WEATHER_ASKED.text}
    reply: JsonObject = {"role": "assistant", "content": "", "tool_calls": calls}
    functions: list[JsonObject] = [
        {"name": t.name, "description": t.description, "parameters": t.parameters} for t in TOOLS
    ]
    tools: list[JsonObject] = [{"type": "function", "function": f} for f in functions]
    text = tokenizer.render_chat([asked, reply], tools, add_generation_prompt=False)
    turn = text[text.rindex(WEATHER_ASKED.text) :]
    turn = turn[turn.index(opener) :]
    if format_of(name).tools.before_text:  # the prompt ends with the opener
        turn = turn.removeprefix(opener)
    for end in PUBLISHED[name].ends:
        turn = turn.partition(end)[0]
    return turn.rstrip()


def parse(
    text: str, reply_format: ReplyFormat, cuts: Sequence[int], *, is_thinking_open: bool = False
) -> Message:
    ids = (str(number) for number in itertools.count())
    parser = ReplyParser(
        reply_format,
        TOOLS,
        is_thinking_open=is_thinking_open,
        new_id=lambda: next(ids),
        sign=lambda: "",
    )
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    events = [event for p in pieces if p for event in parser.push(TextDelta(p))]
    return fold_message([*events, *parser.push(Finished(FinishReason.END_TURN, Usage(1)))])


def calls_of(message: Message) -> tuple[tuple[str, JsonObject], ...]:
    return tuple((p.name, p.arguments) for p in message.parts if isinstance(p, ToolUsePart))


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_template_writes_is_parsed_enforced_replayed_and_documented(name: str) -> None:
    # In one test, because each template needs a process that renders it.
    check_parsing(name)
    check_grammar(name)
    if name not in CHANGED:
        check_replay(name)
    assert f"\n{row(name)}\n" in DOCUMENT.read_text("utf-8")


def check_parsing(name: str) -> None:
    """However the text is cut, the calls are the same."""
    num = num_calls(name)
    calls = written(name, num)
    notation = format_of(name).tools
    said = f"{notation.before_text}Let me look.\n"
    if notation.before_text:
        said += notation.before_name
    text = calls if name in ("GPT-OSS", "Llama 3") else said + calls
    rng = random.Random(name)  # noqa: S311 - a test's choice
    cut_at_random = [sorted(rng.choices(range(len(text)), k=12)) for _ in range(20)]
    for cuts in ([], range(len(text)), *cut_at_random):
        message = parse(text, format_of(name), cuts)
        assert calls_of(message) == CALLS[:num]
        assert message.text == ("Let me look." if text != calls else "")


def check_grammar(name: str) -> None:
    """The grammar accepts what the template writes, and then the end."""
    tokenizer, num = PUBLISHED[name].tokenizer, num_calls(name)
    text = written(name, num)
    if name == "GPT-OSS":  # the template writes an older order of the header
        text = text.replace(" to=functions.get_weather<|channel|>commentary json", "")
        text = f"<|channel|>commentary to=functions.get_weather <|constrain|>json{text}"
    shape = ReplyShape(
        replace(format_of(name), thinking=None),
        tools=TOOLS,
        tool_choice=ToolChoice(ToolMode.REQUIRED, is_parallel=num > 1),
    )
    tokens = tokenizer.encode(text)
    vocabulary = Vocabulary(TokenTable.of(tokenizer), tokenizer.encode)
    for asked in (shape, replace(shape, tool_choice=ToolChoice())):  # required, and strict
        matcher = vocabulary.compile(shape_grammar(asked, tokenizer.special_ids))
        num_valid = matcher.validate_tokens(tokens)
        assert decoded(tokenizer, tokens[:num_valid]) == text
        assert matcher.consume_tokens(tokens)
        assert matcher.is_accepting()


def decoded(tokenizer: TemplateTokenizer, tokens: Sequence[int]) -> str:
    texts = {token.id: token.text.encode() for token in tokenizer.special_tokens}
    return b"".join(texts.get(t) or tokenizer.token_bytes(t) for t in tokens).decode()


def check_replay(name: str) -> None:
    """The next prompt repeats the reply's tokens."""
    tokenizer = PUBLISHED[name].tokenizer
    renderer, store = Renderer(tokenizer), ReplayStore()
    replays = TenantReplays(b"root", store)
    request = ChatRequest("m", (WEATHER_ASKED,), TOOLS)
    prompt = renderer.render(request, replays=replays)
    reply_format = ReplyFormat() if prompt.has_tool_markup else format_of(name)
    num = 1 if not renderer.traits.has_parallel_calls else num_calls(name)
    text = calls_text(CALLS[:num]) if prompt.has_tool_markup else written(name, num)
    opened = decoded(tokenizer, prompt.tokens)
    if reply_format.thinking and reply_format.is_opened_by(opened):
        text = f"hm{reply_format.thinking.end}{text}"
    reply = parse(text, reply_format, [], is_thinking_open=text.startswith("hm"))
    assert calls_of(reply) == CALLS[:num]
    sampled = (*tokenizer.encode(text), min(tokenizer.eos_ids))
    for key in keys_to_remember(prompt_digest(b"root", prompt.tokens), reply):
        store.remember(key, sampled)
    answers = [text_result(str(number), "sunny") for number in range(num)]
    later = replace(request, messages=(WEATHER_ASKED, reply, results(*answers)))
    second = renderer.render(later, replays=replays)
    assert second.num_replayed == 1
    whole = (*prompt.tokens, *tokenizer.encode(text))
    assert second.tokens[: len(whole)] == whole


def test_functionary_writes_text_and_calls_as_the_model_does() -> None:
    name, said = "Functionary 3.2", "Let me look."
    tokenizer, notation = PUBLISHED[name].tokenizer, format_of(name).tools
    renderer, request = Renderer(tokenizer), ChatRequest("m", (WEATHER_ASKED,), TOOLS)
    text = f"{notation.before_text}{said}{notation.before_name}{written(name, 2)}"
    reply = parse(text, format_of(name), [])
    assert (reply.text, calls_of(reply)) == (said, CALLS)
    answers = results(text_result("0", "sunny"), text_result("1", "sent"))
    later = replace(request, messages=(WEATHER_ASKED, reply, answers))
    whole = (*renderer.render(request).tokens, *tokenizer.encode(f"{text}<|eot_id|>"))
    assert renderer.render(later).tokens[: len(whole)] == whole


# -- the documentation --------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "model-onboarding.md"
HEADER = "| family | a call | several | thinking | prompt |\n|---|---|---|---|---|"


def sample(notation: CallNotation) -> str:
    if notation == HARMONY:
        header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        return code(header + '{"a": "x"}')
    value_end = notation.after_value.replace(SLOT, "a")
    arguments = {
        ArgumentStyle.TAGS: f"{notation.before_key}a{notation.before_value}x{value_end}",
        ArgumentStyle.PYTHON: '(a="x")',
        ArgumentStyle.GEMMA: f"a:{notation.quote}x{notation.quote}",
    }.get(notation.style, '{"a": "x"}')
    head = notation.start + notation.before_name + "f" + notation.after_name
    text = head + arguments + notation.after_arguments + notation.end
    return code(re.sub(r"\s*\n\s*", "", text).replace(SLOT, "0"))


def code(text: str) -> str:
    fence = "`" if "`" not in text else "````"
    return f"{fence}{text}{fence}".replace("|", r"\|")


def row(name: str) -> str:
    reply_format = format_of(name)
    thinking = reply_format.thinking_markers
    return (
        " | ".join(
            (
                f"| {name}",
                sample(reply_format.tools),
                "yes" if reply_format.tools.is_parallel else "no",
                f"{code(thinking.start)} {code(thinking.end)}" if thinking else "",
                "template" if traits_of(name).has_tools else "server",
            )
        )
        + " |"
    )


def test_the_documentation_lists_these_families() -> None:
    _, _, rest = DOCUMENT.read_text("utf-8").partition(f"<!-- notations -->\n{HEADER}\n")
    rows = rest.partition("\n<!-- /notations -->")[0].splitlines()
    assert [line.split(" | ")[0][2:] for line in rows] == sorted(PUBLISHED, key=str.lower)
