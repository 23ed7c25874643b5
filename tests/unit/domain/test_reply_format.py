import pytest

from semantic.domain.reply_format import (
    FUNCTION_GEMMA,
    GEMMA_4,
    GEMMA_CODE,
    GRANITE_3,
    HARMONY,
    HERMES,
    LFM,
    LLAMA_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    PHI_4,
    PYTHONIC,
    QWEN_XML,
    Markers,
    ReplyFormat,
    detect_reply_format,
)
from tests.notations import FUNCTIONARY

pytestmark = pytest.mark.unit

THINK = Markers("<think>", "</think>")


@pytest.mark.parametrize(
    "template, special, expected",
    [
        (None, (), ReplyFormat()),
        ("{{ messages }}", ("<tool_call>",), ReplyFormat()),
        ("{% if tools %}<tool_call>", (), ReplyFormat(HERMES)),
        ("{{ tools }}<tool_call></think>", (), ReplyFormat(HERMES, THINK)),
        ("{{ tools }}<tool_call><function=f><parameter=p>", (), ReplyFormat(QWEN_XML)),
        (
            '{{ tools }}{"name": function name, "parameters": dictionary}',
            ("<|python_tag|>",),
            ReplyFormat(LLAMA_JSON),
        ),
        ("{{ tools }}[func_name1(p=1)]", (), ReplyFormat(PYTHONIC)),
        ("{{ tools }}[TOOL_CALLS]", (), ReplyFormat(MISTRAL)),
        (
            "{{ tools }}[TOOL_CALLS]",
            ("[ARGS]", "[THINK]"),
            ReplyFormat(MISTRAL_ARGS, Markers("[THINK]", "[/THINK]")),
        ),
        ("{{ tools }}```tool_code", (), ReplyFormat(GEMMA_CODE)),
        ("{{ tools }}<|tool_list_start|>", (), ReplyFormat(LFM)),
        ("{{ tools }}<|tool|><|/tool|>", (), ReplyFormat(PHI_4)),
        ("{{ tools }} Write <|tool_call|> and a list.", (), ReplyFormat(GRANITE_3)),
        ("{{ tools }}<start_function_call>", (), ReplyFormat(FUNCTION_GEMMA)),
        ("{{ tools }}<|tool_call>", (), ReplyFormat(GEMMA_4)),
        ("<|start|><|channel|>analysis<|message|>", (), ReplyFormat(HARMONY)),
        ("{{ tools }} in a way of its own", (), ReplyFormat()),
        ("<think>", (), ReplyFormat(thinking=THINK)),
    ],
)
def test_the_template_tells_the_format(
    template: str | None, special: tuple[str, ...], expected: ReplyFormat
) -> None:
    assert detect_reply_format(template, special) == expected


def test_only_special_tokens_the_parser_needs_become_visible() -> None:
    special = {"<think>": 5, "[TOOL_CALLS]": 6, "<s>": 1}
    mistral = ReplyFormat(MISTRAL, THINK)
    assert mistral.visible_ids(special, has_tools=True) == {5: b"<think>", 6: b"[TOOL_CALLS]"}
    assert mistral.visible_ids(special, has_tools=False) == {5: b"<think>"}
    harmony = ReplyFormat(HARMONY)
    assert harmony.visible_ids({"<|end|>": 2}, has_tools=False) == {2: b"<|end|>"}


def test_a_prompt_may_open_the_thinking() -> None:
    assert ReplyFormat(thinking=THINK).is_opened_by("<|assistant|><think>\n")
    assert not ReplyFormat(thinking=THINK).is_opened_by("<think>\n\n</think>\n\n")
    assert not ReplyFormat().is_opened_by("<think>")


@pytest.mark.parametrize(
    "reply_format, prompt, opening",
    [
        (ReplyFormat(), "<|assistant|>", ""),
        (ReplyFormat(thinking=THINK), "<|assistant|><think>\n", "\n</think>\n\n"),
        (ReplyFormat(HARMONY), "<|start|>assistant", "<|channel|>final<|message|>"),
        (ReplyFormat(FUNCTIONARY), "assistant\n\n>>>", "all\n"),
    ],
)
def test_an_answer_begins_after_its_markup(
    reply_format: ReplyFormat, prompt: str, opening: str
) -> None:
    assert reply_format.opening(prompt) == opening
