"""How a model writes thinking and tool calls into its reply.

The format is chosen once per model. Parsers read these formats, grammars enforce them, and prompts
explain the default one; all take the markers from here.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from semantic.domain.chat import OutputFormat, ToolChoice, ToolMode, ToolSpec


class ToolFormat(enum.Enum):
    """Notations of tool calls.

    HERMES: ``<tool_call>{"name": "f", "arguments": {…}}</tool_call>`` (Hermes, Qwen; the default).
    QWEN_XML: ``<tool_call><function=f><parameter=a>1</parameter></function></tool_call>``.
    LLAMA_JSON: ``{"name": "f", "parameters": {…}}`` as the whole reply.
    PYTHONIC: ``[f(a=1), g(b="x")]`` as the whole reply.
    MISTRAL: ``[TOOL_CALLS][{"name": "f", "arguments": {…}}]``.
    MISTRAL_ARGS: ``[TOOL_CALLS]f[ARGS]{…}``.
    GEMMA_CODE: a fenced block, ``tool_code``, with calls as in Python.
    FUNCTION_GEMMA: ``<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>``.
    GEMMA_4: the same with ``<|tool_call>``, ``<|"|>`` and ``<tool_call|>``.
    HARMONY: GPT-OSS channels; thinking is one of them.
    """

    HERMES = "hermes"
    QWEN_XML = "qwen_xml"
    LLAMA_JSON = "llama_json"
    PYTHONIC = "pythonic"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"
    GEMMA_CODE = "gemma_code"
    FUNCTION_GEMMA = "function_gemma"
    GEMMA_4 = "gemma_4"
    HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class Markers:
    """The text before and after a thought or a call."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class CallMarkers(Markers):
    """The markers of a tool call notation; each may be a special token of a vocabulary.

    Attributes:
        start: Begins a call or a list of calls.
        end: Ends it; empty if the notation has no end marker.
        quote: Surrounds a string on both sides.
        arguments: Separates a call's name, or its id, from its arguments.
        call_id: Separates a call's name from its id.
    """

    end: str = ""
    quote: str = ""
    arguments: str = ""
    call_id: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        texts = (self.start, self.end, self.quote, self.arguments, self.call_id)
        return tuple(filter(None, texts))


class QwenTag(enum.StrEnum):
    """Tags in calls of `ToolFormat.QWEN_XML`; opening tags are followed by a name and ``>``."""

    FUNCTION = "<function="
    FUNCTION_END = "</function>"
    PARAMETER = "<parameter="
    PARAMETER_END = "</parameter>"


class Harmony(enum.StrEnum):
    """The special tokens of `ToolFormat.HARMONY`."""

    START = "<|start|>"
    END = "<|end|>"
    MESSAGE = "<|message|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    RETURN = "<|return|>"
    CALL = "<|call|>"


FINAL_HEADER = (Harmony.CHANNEL, "final", Harmony.MESSAGE)
ANALYSIS_HEADER = (Harmony.CHANNEL, "analysis", Harmony.MESSAGE)
_ANALYSIS = Markers("".join(ANALYSIS_HEADER), Harmony.END)

_HERMES = CallMarkers("<tool_call>", "</tool_call>")
_MISTRAL = CallMarkers("[TOOL_CALLS]", arguments="[ARGS]", call_id="[CALL_ID]")
CALL_MARKERS: Mapping[ToolFormat, CallMarkers] = {
    ToolFormat.HERMES: _HERMES,
    ToolFormat.QWEN_XML: _HERMES,
    ToolFormat.LLAMA_JSON: CallMarkers("<|python_tag|>"),
    ToolFormat.PYTHONIC: CallMarkers("<|python_tag|>"),
    ToolFormat.MISTRAL: _MISTRAL,
    ToolFormat.MISTRAL_ARGS: _MISTRAL,
    ToolFormat.GEMMA_CODE: CallMarkers("```tool_code", "```"),
    ToolFormat.FUNCTION_GEMMA: CallMarkers(
        "<start_function_call>", "<end_function_call>", quote="<escape>"
    ),
    ToolFormat.GEMMA_4: CallMarkers("<|tool_call>", "<tool_call|>", quote='<|"|>'),
}


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model writes its replies.

    Attributes:
        thinking: Markers around thinking; None if the model does not think or uses channels.
    """

    tools: ToolFormat = ToolFormat.HERMES
    thinking: Markers | None = None

    @property
    def thinking_markers(self) -> Markers | None:
        """Markers around thinking, also those of channels; None if the model does not think."""
        return _ANALYSIS if self.tools is ToolFormat.HARMONY else self.thinking

    def markers(self, *, has_tools: bool) -> tuple[str, ...]:
        """Return texts that the parser must see even if they are special tokens."""
        if self.tools is ToolFormat.HARMONY:
            return tuple(Harmony)
        thinking = (self.thinking.start, self.thinking.end) if self.thinking else ()
        return thinking + (CALL_MARKERS[self.tools].texts if has_tools else ())

    def visible_ids(
        self, special_tokens: Mapping[str, int], *, has_tools: bool
    ) -> Mapping[int, bytes]:
        return {
            special_tokens[marker]: marker.encode()
            for marker in self.markers(has_tools=has_tools)
            if marker in special_tokens
        }

    def opening(self, prompt: str) -> str:
        """Return the markup between a rendered prompt and an answer without thinking."""
        if self.tools is ToolFormat.HARMONY:
            return "".join(FINAL_HEADER)
        if self.thinking is not None and self.is_opened_by(prompt):
            return f"\n{self.thinking.end}\n\n"
        return ""

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the start marker of thinking."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.start)


_THINKING_MARKERS = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<thinking>", "</thinking>"),
    Markers("<|channel>thought", "<channel|>"),
)

# The first format all of whose texts occur wins, so the most specific formats come first.
_TELLTALES: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (ToolFormat.FUNCTION_GEMMA, (CALL_MARKERS[ToolFormat.FUNCTION_GEMMA].start,)),
    (ToolFormat.GEMMA_4, (CALL_MARKERS[ToolFormat.GEMMA_4].start,)),
    (ToolFormat.MISTRAL_ARGS, (_MISTRAL.start, _MISTRAL.arguments)),
    (ToolFormat.MISTRAL, (_MISTRAL.start,)),
    (ToolFormat.QWEN_XML, (QwenTag.FUNCTION, QwenTag.PARAMETER)),
    (ToolFormat.HERMES, (_HERMES.start,)),
    (ToolFormat.GEMMA_CODE, ("tool_code",)),
    (ToolFormat.PYTHONIC, ("[func_name1(",)),
    (ToolFormat.LLAMA_JSON, ('"name":', '"parameters":')),
)


def detect_reply_format(template: str | None, special_tokens: Collection[str]) -> ReplyFormat:
    """Detect a model's reply format from its chat template and special tokens.

    A model whose template does not support tools gets the compact Hermes notation, which the
    prompt must then explain.
    """
    source = template or ""

    def occurs(text: str) -> bool:
        return text in source or text in special_tokens

    if occurs(Harmony.CHANNEL) and occurs(Harmony.MESSAGE):
        return ReplyFormat(ToolFormat.HARMONY)
    thinking = next((m for m in _THINKING_MARKERS if occurs(m.start) or occurs(m.end)), None)
    if "tools" not in source:
        return ReplyFormat(thinking=thinking)
    for tools, texts in _TELLTALES:
        if texts[0] in source and all(map(occurs, texts)):
            return ReplyFormat(tools, thinking)
    return ReplyFormat(thinking=thinking)


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """Requirements on a reply.

    Attributes:
        output: Required format of the text; None means free text.
        is_thinking_open: Whether the prompt ends inside thinking; see `ReplyFormat.is_opened_by`.
        may_think: Whether thinking may come first; otherwise a constrained reply starts with its
            answer.
        opening: Markup at the end of the prompt that counts as the beginning of the reply.
    """

    format: ReplyFormat
    output: OutputFormat | None = None
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    is_thinking_open: bool = False
    may_think: bool = True
    opening: str = ""

    @property
    def allowed_tools(self) -> tuple[ToolSpec, ...]:
        if self.tool_choice.mode is ToolMode.NONE:
            return ()
        if self.tool_choice.mode is ToolMode.NAMED:
            return tuple(tool for tool in self.tools if tool.name == self.tool_choice.name)
        allowed = self.tool_choice.allowed
        return tuple(tool for tool in self.tools if allowed is None or tool.name in allowed)

    @property
    def must_call(self) -> bool:
        return self.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

    @property
    def may_repeat_calls(self) -> bool:
        """Whether the reply may hold several calls; a tool chosen by name is called once."""
        return self.tool_choice.is_parallel and self.tool_choice.mode is not ToolMode.NAMED

    @property
    def is_free(self) -> bool:
        has_strict = any(tool.is_strict for tool in self.allowed_tools)
        is_limited = self.tool_choice.allowed is not None
        return self.output is None and not (self.must_call or has_strict or is_limited)
