"""How a model writes thinking and tool calls into its reply: values, chosen once a model.

Parsers read these formats and grammars enforce them; both take the markers from here.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from semantic.domain.chat import OutputFormat, ToolChoice, ToolMode, ToolSpec


class ToolFormat(enum.Enum):
    """The families of notation for a tool call.

    HERMES: ``<tool_call>{"name": "f", "arguments": {…}}</tool_call>`` (Hermes, Qwen, our default).
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
    """What stands before and after a thought or a call."""

    start: str
    end: str


# Texts that may be special tokens of a vocabulary, by the format that writes them.
_TOOL_MARKERS: Mapping[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.QWEN_XML: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA_JSON: ("<|python_tag|>",),
    ToolFormat.PYTHONIC: ("<|python_tag|>",),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ToolFormat.MISTRAL_ARGS: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ToolFormat.GEMMA_CODE: (),
    ToolFormat.FUNCTION_GEMMA: ("<start_function_call>", "<end_function_call>", "<escape>"),
    ToolFormat.GEMMA_4: ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ToolFormat.HARMONY: (),
}
_HARMONY_MARKERS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip
_ANALYSIS = Markers("<|channel|>analysis<|message|>", "<|end|>")


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model writes its replies.

    Attributes:
        tools: How it writes tool calls.
        thinking: What stands around its thinking; None if it has none, or writes channels.
        is_native: Whether the model's own template shows tools; if not, the prompt must explain
            them in the format named here.
    """

    tools: ToolFormat = ToolFormat.HERMES
    thinking: Markers | None = None
    is_native: bool = False

    @property
    def thinking_markers(self) -> Markers | None:
        """What stands around thinking, in channels too; None if there is none."""
        return _ANALYSIS if self.tools is ToolFormat.HARMONY else self.thinking

    def markers(self, *, has_tools: bool) -> tuple[str, ...]:
        """Texts that must stay visible to the parser even where they are special tokens."""
        if self.tools is ToolFormat.HARMONY:
            return _HARMONY_MARKERS
        thinking = (self.thinking.start, self.thinking.end) if self.thinking else ()
        return thinking + (_TOOL_MARKERS[self.tools] if has_tools else ())

    def visible_ids(
        self, special_tokens: Mapping[str, int], *, has_tools: bool
    ) -> Mapping[int, bytes]:
        """The special tokens whose text the parser needs, with that text."""
        return {
            special_tokens[marker]: marker.encode()
            for marker in self.markers(has_tools=has_tools)
            if marker in special_tokens
        }

    def opening(self, prompt: str) -> str:
        """What stands between a rendered prompt and an answer without thinking."""
        if self.tools is ToolFormat.HARMONY:
            return "<|channel|>final<|message|>"
        if self.thinking is not None and self.is_opened_by(prompt):
            return f"\n{self.thinking.end}\n\n"
        return ""

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside the thinking it opened."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.start)


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """What a reply must look like.

    Attributes:
        format: How the model writes calls and thinking.
        output: What the text must be; None leaves it free.
        tools: The tools on offer.
        is_thinking_open: The prompt ends inside thinking; see `ReplyFormat.is_opened_by`.
        may_think: Thinking may come first; without it a constrained reply starts with its answer.
        opening: Markup that the reply is taken to begin with; it stands in the prompt.
    """

    format: ReplyFormat
    output: OutputFormat | None = None
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    is_thinking_open: bool = False
    may_think: bool = True
    opening: str = ""

    @property
    def offered(self) -> tuple[ToolSpec, ...]:
        """The tools that may be called."""
        if self.tool_choice.mode is ToolMode.NONE:
            return ()
        if self.tool_choice.mode is ToolMode.NAMED:
            return tuple(tool for tool in self.tools if tool.name == self.tool_choice.name)
        return self.tools

    @property
    def must_call(self) -> bool:
        """Whether the reply must be a tool call."""
        return self.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

    @property
    def may_repeat_calls(self) -> bool:
        """Whether several calls may follow each other: a tool that is named is called once."""
        return self.tool_choice.is_parallel and self.tool_choice.mode is not ToolMode.NAMED

    @property
    def is_free(self) -> bool:
        """Whether nothing needs to be enforced."""
        has_strict = any(tool.is_strict for tool in self.offered)
        return self.output is None and not self.must_call and not has_strict
