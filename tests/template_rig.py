"""Chat templates of published models, with a vocabulary of bytes and their special tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from semantic.adapters.outbound.backends.fake import VOCAB_SIZE, FakeTokenizer
from semantic.adapters.outbound.models.chat_template import ChatTemplate
from semantic.ports.text import SpecialToken

DIRECTORY = Path(__file__).parent / "chat_templates"
_BAR = "[|\uff5c]"  # also as a full-width character
_TAGS = re.compile(
    rf"<{_BAR}[^<>{{}}'\s]*{_BAR}>|<{_BAR}[a-z_]+>|<[a-z_]+{_BAR}>|\[/?[A-Z_]{{3,}}\]"
)
_PARTS = ("\uff5cDSML\uff5c", "]<]minimax[>[")  # special tokens inside of tags


@dataclass(frozen=True)
class PublishedTemplate:
    """A template's file, and the tokens that end a reply of its model."""

    file: str
    ends: tuple[str, ...]

    @cached_property
    def tokenizer(self) -> "TemplateTokenizer":
        return TemplateTokenizer((DIRECTORY / f"{self.file}.jinja").read_text("utf-8"), self.ends)


_IM_END = ("<|im_end|>",)
_SENTENCE_END = ("<\uff5cend\u2581of\u2581sentence\uff5c>",)
_GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_LLAMA_ENDS = ("<|eot_id|>", "<|eom_id|>")
_EOS = ("</s>",)
_COHERE_ENDS = ("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>")
# By the name of the family, as the documentation lists them.
PUBLISHED: Mapping[str, PublishedTemplate] = {
    name: PublishedTemplate(file, ends)
    for name, file, ends in (
        ("Apertus", "Apertus-8B-Instruct", ("<|assistant_end|>",)),
        ("Apriel 1.5", "unsloth-Apriel-1.5", ("<|end|>",)),
        ("Command R+", "CohereForAI-c4ai-command-r-plus-tool_use", _COHERE_ENDS),
        ("Command R7B", "CohereForAI-c4ai-command-r7b-12-2024-tool_use", _COHERE_ENDS),
        ("DeepSeek R1 distilled", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", _SENTENCE_END),
        ("DeepSeek V3.1", "deepseek-ai-DeepSeek-V3.1", _SENTENCE_END),
        ("DeepSeek V3.2", "deepseek-ai-DeepSeek-V3.2", _SENTENCE_END),
        ("DeepSeek V4", "deepseek-ai-DeepSeek-V4", _SENTENCE_END),
        ("Functionary 3.1", "meetkai-functionary-medium-v3.1", _LLAMA_ENDS),
        ("Functionary 3.2", "meetkai-functionary-medium-v3.2", _LLAMA_ENDS),
        ("Gemma 4", "google-gemma-4-31B-it", ("<turn|>", "<|tool_response>")),
        ("GigaChat 3.1", "GigaChat3.1-10B-A1.8B", ("<|message_sep|>",)),
        ("GLM 4.5, 4.6", "GLM-4.6", _GLM_ENDS),
        ("GLM 4.7", "GLM-4.7-Flash", _GLM_ENDS),
        ("GPT-OSS", "openai-gpt-oss-120b", ("<|return|>", "<|call|>")),
        ("Granite 3.3", "ibm-granite-granite-3.3-2B-Instruct", ("<|end_of_text|>",)),
        ("Granite 4", "ibm-granite-granite-4.0", ("<|end_of_text|>",)),
        ("Hy3", "tencent-Hy3", ("<\uff5chy_eos:opensource\uff5c>",)),
        ("Kimi K2", "Kimi-K2-Instruct", _IM_END),
        ("Kimi K2 Thinking", "Kimi-K2-Thinking", _IM_END),
        ("Laguna", "poolside-Laguna-XS.2", ("</assistant>",)),
        ("LFM2", "LFM2-8B-A1B", _IM_END),
        ("LFM2.5", "LFM2.5-8B-A1B", _IM_END),
        ("Ling 3", "inclusionai-ling-3.0-flash", ("<|role_end|>",)),
        ("Llama 3", "meta-llama-Llama-3.1-8B-Instruct", _LLAMA_ENDS),
        ("MiniCPM5", "openbmb-MiniCPM5-1B", _IM_END),
        ("MiniMax M1", "MiniMax-M1", ("<end_of_sentence>",)),
        ("MiniMax M2", "MiniMax-M2", ("[e~[",)),
        ("MiniMax M3", "MiniMax-M3", ("[e~[",)),
        ("Ministral 3", "mistralai-Ministral-3-14B-Reasoning-2512", _EOS),
        ("Mistral Nemo", "mistralai-Mistral-Nemo-Instruct-2407", _EOS),
        ("Mistral Small 3.2", "Mistral-Small-3.2-24B-Instruct-2506", _EOS),
        ("Nemotron Nano 2", "NVIDIA-Nemotron-Nano-v2", ("<SPECIAL_12>",)),
        ("Phi-4-mini", "convention-Phi-4-mini", ("<|end|>", "<|endoftext|>")),
        ("Qwen 2.5, 3", "Qwen-Qwen3-0.6B", _IM_END),
        ("Qwen3-Coder, 3.5; Nemotron 3", "Qwen3-Coder", _IM_END),
        ("Seed-OSS", "ByteDance-Seed-OSS", ("<seed:eos>",)),
        ("SmolLM3", "convention-SmolLM3", _IM_END),
        ("SmolLM3, template by Unsloth", "HuggingFaceTB-SmolLM3-3B", _IM_END),
        ("Solar Open", "upstage-Solar-Open-100B", ("<|end|>", "<|calls|>")),
        ("Step 3.5", "StepFun3.5-Flash", _IM_END),
    )
}  # fmt: skip


class TemplateTokenizer(FakeTokenizer):
    """One token per byte, and one for each tag of the template that looks like a special token."""

    special_tokens: tuple[SpecialToken, ...]

    def __init__(self, source: str, ends: Sequence[str]) -> None:
        parts = [text for text in _PARTS if text in source]
        texts = list(dict.fromkeys((*ends, *parts, "<s>", "</s>", *_TAGS.findall(source))))
        self.chat_template = source
        self.special_tokens = tuple(SpecialToken(VOCAB_SIZE + i, t) for i, t in enumerate(texts))
        self.special_ids = {token.text: token.id for token in self.special_tokens}
        self.eos_ids = frozenset(self.special_ids[end] for end in ends)
        self.vocab_size = VOCAB_SIZE + len(texts)
        longest_first = sorted(texts, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        values = {"bos_token": "<s>", "eos_token": ends[0], "pad_token": "", "unk_token": ""}
        self.render_chat = ChatTemplate(source, values).render  # type: ignore[method-assign]

    def encode(self, text: str) -> list[int]:
        pieces = [piece for piece in self._cut.split(text) if piece]
        ids = self.special_ids
        return [t for p in pieces for t in ([ids[p]] if p in ids else p.encode())]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)
