"""How a model writes thinking and tool calls into its reply.

The format is determined once per model, mostly by rendering its chat template. Parsers read these
formats, grammars enforce them, and prompts explain the default one; all take them from here.
"""

import enum
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from semantic.domain.chat import OutputFormat, ToolChoice, ToolMode, ToolSpec


class ArgumentStyle(enum.Enum):
    """Notations of a call's arguments.

    JSON: one JSON object.
    TAGS: a pair of tags for each argument.
    PYTHON: keyword arguments as in Python, ``f(a=1)``.
    GEMMA: an object without quotes around keys, and with a marker around strings.
    CHANNELS: the messages of GPT-OSS; thinking is one of them.
    """

    JSON = "JSON"
    TAGS = "tags"
    PYTHON = "Python"
    GEMMA = "Gemma"
    CHANNELS = "channels"


@dataclass(frozen=True, slots=True)
class Markers:
    """The text before and after a thought."""

    start: str
    end: str


SLOT = "\0"  # stands for a call's id or number in a text of a notation
_JSON_BEGINS = re.compile(r"\s*(\[\s*)?\{.*", re.DOTALL)
_FIRST_TAG = re.compile(rf"[^>\s{SLOT}]*>?")
PYTHON_TAG = "<|python_tag|>"
CDATA = Markers("<![CDATA[", "]]>")


@dataclass(frozen=True, slots=True)
class CallNotation:
    """The texts around the parts of tool calls, in the order of a reply.

    A reply with two calls is ``start CALL separator CALL end``, and a call is ``before_name NAME
    after_name ARGUMENTS after_arguments``. White space in these texts is what the template writes;
    parsers accept any.

    Attributes:
        before_key: With `ArgumentStyle.TAGS`, an argument is ``before_key KEY before_value VALUE
            after_value``.
        before_other: Replaces `before_value` if the value is not a string.
        after_value: `SLOT` in it stands for the argument's key.
        has_cdata: A value may be enclosed in ``<![CDATA[`` and ``]]>``.
        quote: Surrounds a string on both sides, in Python or Gemma's notation.
        is_parallel: Whether a reply may hold several calls.
        is_json_spaced: The template indents JSON, so its white space is free.
        before_text: Precedes text in the place of a name and `after_name`, where text has markup as
            calls have: ``all``. The first `before_name` of a reply is then the prompt's end.
    """

    style: ArgumentStyle = ArgumentStyle.JSON
    start: str = ""
    before_name: str = ""
    after_name: str = ""
    after_arguments: str = ""
    separator: str = ""
    end: str = ""
    before_key: str = ""
    before_value: str = ""
    before_other: str = ""
    after_value: str = ""
    has_cdata: bool = False
    quote: str = ""
    is_parallel: bool = True
    is_json_spaced: bool = False
    before_text: str = ""

    @property
    def is_json_object(self) -> bool:
        """Whether a whole call is a JSON object, name included."""
        return self.style is ArgumentStyle.JSON and "{" in self.before_name

    @property
    def opener(self) -> str:
        """The marker that distinguishes a call from text; empty if there is none."""
        if self.before_text:
            return self.before_name
        if self.is_json_object:
            return _JSON_BEGINS.sub("", self.start + self.before_name).strip()
        if self.style is ArgumentStyle.PYTHON:
            return self.start.removesuffix("[").strip()
        if self.start:
            return self.start.split()[0]
        found = _FIRST_TAG.match(self.before_name)
        return found[0] if found else ""

    @property
    def inner_opener(self) -> str:
        """The marker that begins another call after a call, or one whose opener is missing."""
        if self.is_json_object:
            return "{" if self.start or not self.opener else ""
        if self.before_text:
            return ""
        tag = 0 if self.start else max(0, self.before_name.rfind("<"))
        found = _FIRST_TAG.match(self.before_name[tag:].lstrip())
        return found[0] if found and found[0] != self.opener else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts; special tokens in them must be visible to the parser."""
        own = (
            self.start, self.before_name, self.after_name, self.after_arguments, self.separator,
            self.end, self.before_key, self.before_value, self.before_other, self.after_value,
            self.quote,
        )  # fmt: skip
        return own if self.opener else (*own, PYTHON_TAG)


class Harmony(enum.StrEnum):
    """The special tokens of `HARMONY`."""

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

HERMES = CallNotation(
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    after_arguments="}\n</tool_call>",
    separator="\n",
)
QWEN_XML = CallNotation(
    ArgumentStyle.TAGS,
    before_name="<tool_call>\n<function=",
    after_name=">",
    after_arguments="\n</function>\n</tool_call>",
    separator="\n",
    before_key="\n<parameter=",
    before_value=">\n",
    before_other=">\n",
    after_value="\n</parameter>",
)
LLAMA_JSON = CallNotation(
    before_name='{"name": "',
    after_name='", "parameters": ',
    after_arguments="}",
    is_parallel=False,
)
PYTHONIC = CallNotation(ArgumentStyle.PYTHON, start="[", separator=", ", end="]")
LFM = CallNotation(
    ArgumentStyle.PYTHON,
    start="<|tool_call_start|>[",
    separator=", ",
    end="]<|tool_call_end|>",
)
MISTRAL = CallNotation(
    start="[TOOL_CALLS][",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_arguments="}",
    separator=", ",
    end="]",
)
MISTRAL_ARGS = CallNotation(before_name="[TOOL_CALLS]", after_name="[ARGS]")
PHI_4 = replace(MISTRAL, start="<|tool_call|>[", end="]<|/tool_call|>")
GRANITE_3 = replace(MISTRAL, start="<|tool_call|>[")
GEMMA_CODE = CallNotation(ArgumentStyle.PYTHON, start="```tool_code\n", separator="\n", end="\n```")
FUNCTION_GEMMA = CallNotation(
    ArgumentStyle.GEMMA,
    before_name="<start_function_call>call:",
    after_name="{",
    after_arguments="}<end_function_call>",
    quote="<escape>",
)
GEMMA_4 = replace(
    FUNCTION_GEMMA,
    before_name="<|tool_call>call:",
    after_arguments="}<tool_call|>",
    quote='<|"|>',
)
HARMONY = CallNotation(ArgumentStyle.CHANNELS)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model writes its replies.

    Attributes:
        thinking: Markers around thinking; None if the model does not think or uses channels.
    """

    tools: CallNotation = HERMES
    thinking: Markers | None = None

    @property
    def thinking_markers(self) -> Markers | None:
        """Markers around thinking, also those of channels; None if the model does not think."""
        return _ANALYSIS if self.tools == HARMONY else self.thinking

    def visible_ids(
        self, special_tokens: Mapping[str, int], *, has_tools: bool
    ) -> Mapping[int, bytes]:
        """Return the special tokens that the parser must see, with their text."""
        texts: tuple[str, ...] = (self.thinking.start, self.thinking.end) if self.thinking else ()
        texts += self.tools.texts if has_tools else ()
        texts += tuple(Harmony) if self.tools == HARMONY else ()
        return {
            token: special.encode()
            for special, token in special_tokens.items()
            if any(special in text for text in texts)
        }

    def opening(self, prompt: str) -> str:
        """Return the markup between a rendered prompt and an answer without thinking."""
        if self.tools == HARMONY:
            return "".join(FINAL_HEADER)
        if self.thinking is not None and self.is_opened_by(prompt):
            return f"\n{self.thinking.end}\n\n"
        return self.tools.before_text

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the start marker of thinking."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.start)


_THINKING_MARKERS = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<thinking>", "</thinking>"),
    Markers("<|channel>thought", "<channel|>"),
)

# The first notation all of whose texts occur wins, so the most specific ones come first.
_TELLTALES: tuple[tuple[CallNotation, tuple[str, ...]], ...] = (
    (FUNCTION_GEMMA, ("<start_function_call>",)),
    (GEMMA_4, ("<|tool_call>",)),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (LFM, ("<|tool_list_start|>",)),
    (LFM, ("List of tools: [",)),
    (PHI_4, ("<|/tool|>",)),
    (GRANITE_3, ("<|tool_call|>",)),
    (QWEN_XML, ("<function=", "<parameter=")),
    (HERMES, ("<tool_call>",)),
    (GEMMA_CODE, ("tool_code",)),
    (PYTHONIC, ("[func_name1(",)),
    (LLAMA_JSON, ('"name":', '"parameters":')),
)


def guess_notation(template: str | None, special_tokens: Collection[str]) -> CallNotation | None:
    """Guess the notation of calls from words in a chat template; None if there are none."""
    source = template or ""
    if "tools" not in source:
        return None
    for tools, texts in _TELLTALES:
        if texts[0] in source and all(t in source or t in special_tokens for t in texts):
            return tools
    return None


def detect_reply_format(template: str | None, special_tokens: Collection[str]) -> ReplyFormat:
    """Guess a model's reply format from words in its chat template and its special tokens.

    Needed for what a template does not render: `format_probe.py` determines the rest. A model whose
    template does not support tools gets the compact Hermes notation, which the prompt must then
    explain.
    """
    source = template or ""

    def occurs(text: str) -> bool:
        return text in source or text in special_tokens

    if occurs(Harmony.CHANNEL) and occurs(Harmony.MESSAGE):
        return ReplyFormat(HARMONY)
    thinking = next((m for m in _THINKING_MARKERS if occurs(m.start) or occurs(m.end)), None)
    return ReplyFormat(guess_notation(template, special_tokens) or HERMES, thinking)


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
