"""Notations of tool calls: all that a template need not show, and some that templates show."""

from collections.abc import Mapping

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
    SLOT,
    ArgumentStyle,
    CallNotation,
)

GLM = CallNotation(
    ArgumentStyle.TAGS,
    before_name="<tool_call>",
    after_arguments="\n</tool_call>",
    separator="\n",
    before_key="\n<arg_key>",
    before_value="</arg_key>\n<arg_value>",
    before_other="</arg_key>\n<arg_value>",
    after_value="</arg_value>",
)
KIMI = CallNotation(
    start="<|calls|>",
    before_name="<|call|>functions.",
    after_name=f":{SLOT}<|arguments|>",
    after_arguments="<|end call|>",
    end="<|end calls|>",
)
DEEPSEEK = CallNotation(
    ArgumentStyle.TAGS,
    start="<DSML calls>",
    before_name='\n<DSML invoke name="',
    after_name='">',
    after_arguments="\n</DSML invoke>",
    end="\n</DSML calls>",
    before_key='\n<DSML parameter name="',
    before_value='" string="true">',
    before_other='" string="false">',
    after_value="</DSML parameter>",
)
APERTUS = CallNotation(
    start="<|tools_prefix|>[",
    before_name='{"',
    after_name='": ',
    after_arguments="}",
    separator=", ",
    end="]<|tools_suffix|>",
)
FUNCTIONARY = CallNotation(before_name=">>>", after_name="\n", before_text="all\n")
NOTATIONS: Mapping[str, CallNotation] = {
    "hermes": HERMES,
    "qwen_xml": QWEN_XML,
    "llama_json": LLAMA_JSON,
    "pythonic": PYTHONIC,
    "lfm": LFM,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "phi_4": PHI_4,
    "granite_3": GRANITE_3,
    "gemma_code": GEMMA_CODE,
    "function_gemma": FUNCTION_GEMMA,
    "gemma_4": GEMMA_4,
    "harmony": HARMONY,
    "glm": GLM,
    "kimi": KIMI,
    "deepseek": DEEPSEEK,
    "apertus": APERTUS,
    "functionary": FUNCTIONARY,
}
