"""Which notation a model was trained on, told by its chat template and special tokens."""

from collections.abc import Collection

from semantic.domain.reply_format import Markers, ReplyFormat, ToolFormat

_THINKING = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<thinking>", "</thinking>"),
    Markers("<|channel>thought", "<channel|>"),
)

# The first format all of whose texts occur wins; the most telling come first.
_TOOLS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (ToolFormat.FUNCTION_GEMMA, ("<start_function_call>",)),
    (ToolFormat.GEMMA_4, ("<|tool_call>",)),
    (ToolFormat.MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (ToolFormat.MISTRAL, ("[TOOL_CALLS]",)),
    (ToolFormat.QWEN_XML, ("<function=", "<parameter=")),
    (ToolFormat.HERMES, ("<tool_call>",)),
    (ToolFormat.GEMMA_CODE, ("tool_code",)),
    (ToolFormat.PYTHONIC, ("[func_name1(",)),
    (ToolFormat.LLAMA_JSON, ('"name":', '"parameters":')),
)


def detect_reply_format(template: str | None, special_tokens: Collection[str]) -> ReplyFormat:
    """Choose how to read a model's replies.

    A template that shows no tools gets the compact Hermes notation, which the prompt must then
    explain (`ReplyFormat.is_native` is False).
    """
    source = template or ""

    def occurs(text: str) -> bool:
        return text in source or text in special_tokens

    if occurs("<|channel|>") and occurs("<|message|>"):
        return ReplyFormat(ToolFormat.HARMONY, is_native=True)
    thinking = next((m for m in _THINKING if occurs(m.start) or occurs(m.end)), None)
    if "tools" not in source:
        return ReplyFormat(thinking=thinking)
    for tools, texts in _TOOLS:
        if texts[0] in source and all(map(occurs, texts)):
            return ReplyFormat(tools, thinking, is_native=True)
    return ReplyFormat(thinking=thinking)
