# ruff: noqa: RUF001  # expressions name characters of many scripts
"""How byte-level tokenizers split text before merging, by the names that GGUF files use.

GGUF names the pre-tokenizer instead of describing it. The expressions are those of the models' own
``tokenizer.json``, as llama.cpp quotes them. A wrong choice for an unknown name would silently
split text wrongly, so there is no default.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence


@dataclass(frozen=True, slots=True)
class Splitting:
    """How one pre-tokenizer splits text.

    Attributes:
        patterns: Regular expressions, applied one after the other; each match becomes a piece. If
            empty, single digits are split off and the rest is split with GPT-2's expression.
        is_nfc: Whether text is normalised to Unicode's form C first.
        ignores_merges: Whether a piece that is a token needs no merges.
        adds_bos: Whether text starts with the BOS token, unless the file says otherwise.
    """

    patterns: tuple[str, ...] = ()
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        steps: list[PreTokenizer] = [
            Split(Regex(pattern), behavior="isolated", invert=False) for pattern in self.patterns
        ]
        is_gpt2 = not steps
        if is_gpt2:
            steps = [Digits(individual_digits=True)]
        return PreTokenizerSequence([*steps, ByteLevel(add_prefix_space=False, use_regex=is_gpt2)])


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS, _SPACES = r" ?[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(numbers: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{_OTHERS}[\r\n]*|{_SPACES}"


def _cased_words(numbers: str, ending: str = "", less: str = "") -> str:
    """Starts a new word also at an upper-case letter after lower-case ones."""
    upper, lower = (
        rf"[\p{{{case}}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{less}]".replace(r"\p{Lt}", lone)
        for case, lone in (("Lu", r"\p{Lt}"), ("Ll", ""))
    )
    start, end = r"[^\r\n\p{L}\p{N}]?", f"{ending}?" if ending else ""
    words = rf"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}"
    return rf"{words}|{numbers}|{_OTHERS}[\r\n/]*|{_SPACES}"


_MARKED_WORDS = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED_WORDS = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}|"
    rf" ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_BAILING_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_KIMI_WORDS = "[\\p{Han}]+|" + _cased_words(r"\p{N}{1,3}", _CONTRACTION, r"&&[^\p{Han}]")
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-"
    "\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90"
    "-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-"
    "\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    "\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", _cased_words(r"\p{N}{1,3}", _CONTRACTION))
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_LLAMA3 = Splitting((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_THREE_DIGITS = Splitting((_words(r"\p{N}{1,3}"),))
_ONE_DIGIT = Splitting((_words(r"\p{N}"),))
_QWEN2 = Splitting((_words(r"\p{N}"),), is_nfc=True)
_GPT2_ALONE = Splitting((_GPT2,))
_GPT4O = Splitting((_cased_words(r"\p{N}{1,3}", _CONTRACTION),))

_BY_SPLITTING = (
    (Splitting(), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_GPT2_ALONE, "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion exaone4"),
    (_GPT2_ALONE, "granite-docling"),
    (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_THREE_DIGITS, "dbrx smaug-bpe chatglm-bpe"),
    (Splitting((_words(r"\p{N}{1,3}"),), ignores_merges=True), "glm4 glm5"),
    (_QWEN2, "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez"),
    (_ONE_DIGIT, "stablelm2 hunyuan solar-open grok-2"),
    (Splitting((_MARKED_WORDS,), is_nfc=True), "qwen35"),
    (Splitting((_cased_words(r"\p{N}"),), ignores_merges=True, adds_bos=True), "tekken"),
    (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Splitting(_TINY_AYA), "tiny_aya cohere2moe"),
    (Splitting((_KIMI_WORDS,)), "kimi-k2"),
    (Splitting((_SEED_WORDS,)), "seed-coder"),
    (Splitting((_BAILING_WORDS,)), "bailingmoe bailingmoe2 llada-moe"),
    (Splitting(_DEEPSEEK_3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (Splitting(_DEEPSEEK_CODER), "deepseek-coder"),
    (Splitting(_DEEPSEEK_LLM), "deepseek-llm"),
    (Splitting(_FALCON), "falcon"),
    (Splitting((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    (Splitting((_BLOOM, r"\p{N}")), "viking"),
    (
        Splitting((r"\p{N}{1,3}", _words(r"\p{N}+")), ignores_merges=True),
        "minicpm5",
    ),
)
SPLITTINGS = {name: splitting for splitting, names in _BY_SPLITTING for name in names.split()}
