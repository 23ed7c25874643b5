"""The starter model's tokenizer against the library's own."""

import json
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.parsing import TextAssembler
from semantic.application.prompt.renderer import render
from semantic.application.prompt.special_text import SpecialText
from semantic.domain.chat import ChatRequest, Message, Role
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.integration

TEXTS = [
    "plain words",
    " leading and trailing ",
    "digits 0123456789 and 3.14",
    "naïve café, Zürich, smørrebrød",
    "漢字とかな 한국어 中文 ภาษาไทย العربية",
    "e\u0301 stays decomposed, and so does \u1112\u1161\u11ab",
    "",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 🙂",
    "def f(x):\n    if x:\n\t\treturn  x\n\n\n",
    "\u200b\u00a0\r\n",
]


@pytest.fixture(scope="module")
def reference(starter_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(starter_model_dir / "tokenizer.json"))


def decode(tokenizer: HFTokenizer, ids: list[int]) -> str:
    assembler = TextAssembler(tokenizer.token_bytes)
    deltas = [*(assembler.feed(token) for token in ids), assembler.finish()]
    return "".join(delta.text for delta in deltas if delta)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_text_has_the_tokens_that_the_library_finds_in_it_whole(
    tokenizer: HFTokenizer, reference: Tokenizer, seed: int
) -> None:
    fragments = [*TEXTS, "a", "word", "another", "I'll", "it's", "12", "<|im_end|>", "<|", "x\n"]
    places = [i * (i + seed) for i in range(9999)]
    text = "".join(("", " ", "  ", "\n")[n % 4] + fragments[n % len(fragments)] for n in places)
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
    text = text.replace("<|", "<")  # nothing special
    whole = reference.encode("a" + text, add_special_tokens=False).ids
    assert tokenizer.encode_plain("a" + text, is_start=True) == whole
    assert tokenizer.encode_plain("\n" + text) == reference.encode("<|im_end|>\n" + text).ids[1:]


def test_a_vocabulary_that_joins_words_encodes_texts_whole_and_to_their_end(tmp_path: Path) -> None:
    merges = [("a", " "), ("a ", "a"), ("a a", " "), ("a a ", "a a")]
    vocab = {token: i for i, token in enumerate(["a", " ", *map("".join, merges)])}
    library = Tokenizer(models.BPE(vocab, merges))
    library.decoder = decoders.Metaspace()
    library.enable_truncation(7)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    text = " ".join("a" * 20000)
    library.no_truncation()
    library.no_padding()
    assert HFTokenizer(tmp_path).encode(text) == library.encode(text).ids


def test_pieces_of_random_token_streams_join_to_the_full_decoding(
    tokenizer: HFTokenizer, reference: Tokenizer
) -> None:
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    def check(ids: list[int]) -> None:
        assert decode(tokenizer, ids) == reference.decode(ids, skip_special_tokens=True)

    check()


def test_special_tokens_are_single_ids_and_no_text(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] in {1}
    assert ids[-1] in tokenizer.eos_ids
    assert decode(tokenizer, ids) == "user\nhi"
    assert tokenizer.token_bytes(10**6) == b""


def test_the_chat_template_is_the_models_own(tokenizer: HFTokenizer) -> None:
    text = tokenizer.render_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]).startswith(
        "<|im_start|>system\n"
    )


def write_model(directory: Path, decoder: object, template: object) -> Path:
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0, "content": "</s>", "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True,
            }
        ],
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": True,
            "fuse_unk": False, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "vocab": {"</s>": 0, "\u2581Hi": 1, "<0xC3>": 2, "<0xA9>": 3, "\u2581": 4},
            "merges": [],
        },
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"chat_template": template, "eos_token": {"content": "</s>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write_model(tmp_path, SENTENCEPIECE, "{{ messages[0].content }}"))
    assert decode(tokenizer, [1, 4, 2, 3, 0]) == " Hi é"
    assert tokenizer.eos_ids == {0}


def test_a_whole_prompt_begins_as_the_models_texts_do(tmp_path: Path) -> None:
    path = write_model(tmp_path, SENTENCEPIECE, "") / "tokenizer.json"
    plain = HFTokenizer(tmp_path)
    assert plain.encode_prompt("\u2581") == [4]
    stored = json.loads(path.read_text())
    stored["added_tokens"].append({**stored["added_tokens"][0], "id": 5, "content": "<s>"})
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    stored["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
    }
    path.write_text(json.dumps(stored))
    begun = HFTokenizer(tmp_path)
    assert begun.encode("\u2581") == [4]
    assert begun.encode_prompt("\u2581") == [5, 4]
    assert begun.encode_prompt("<s>\u2581</s>") == [5, 4, 0]


def test_a_template_can_refuse_and_may_be_missing(tmp_path: Path) -> None:
    refusing = write_model(tmp_path, SENTENCEPIECE, "{{ raise_exception('no roles') }}")
    with pytest.raises(InvalidRequestError, match="no roles"):
        HFTokenizer(refusing).render_chat([])
    named = [{"name": "default", "template": "{{ tools | tojson }}"}]
    assert HFTokenizer(write_model(tmp_path, SENTENCEPIECE, named)).render_chat([]) == "null"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        HFTokenizer(write_model(tmp_path, SENTENCEPIECE, None)).render_chat([])
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    text = HFTokenizer(write_model(tmp_path, SENTENCEPIECE, "unused")).render_chat([])
    assert text.isdigit()


def test_a_template_shows_the_day_it_is_given(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write_model(tmp_path, SENTENCEPIECE, "{{ strftime_now('%d %b %Y') }}"))
    assert tokenizer.render_chat([], today=date(2026, 3, 1)) == "01 Mar 2026"


def test_a_template_gets_the_thinking_setting(tmp_path: Path) -> None:
    template = "{{ enable_thinking if enable_thinking is defined else 'unset' }}"
    tokenizer = HFTokenizer(write_model(tmp_path, SENTENCEPIECE, template))
    shown = [tokenizer.render_chat([], is_thinking=value) for value in (None, True, False)]
    assert shown == ["unset", "True", "False"]


# -- plain text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("around", ["{}", "a {}b", "{0}{0}"])
def test_plain_text_holds_no_special_token(tokenizer: HFTokenizer, around: str) -> None:
    special = {token.id for token in tokenizer.special_tokens}
    assert special >= tokenizer.eos_ids
    spellings = [token.text for token in tokenizer.special_tokens]
    for spelling in (*spellings, "\ufdd0before\ufdd0"):
        text = around.format(spelling)
        ids = tokenizer.encode_plain(text)
        assert special.isdisjoint(ids)
        assert max(ids) < tokenizer.vocab_size
        assert decode(tokenizer, ids) == text


def sentencepiece_model(directory: Path, scheme: str) -> Path:
    """A vocabulary that writes a first word differently, and can spell its end token."""
    pieces = ["<unk>", "</s>", "<u>", "\u2581", "h", "i", "hi", "\u2581hi", "<", "/", "s", ">"]
    pieces += ["</", "</s", "\n"]
    merges = [("h", "i"), ("\u2581", "hi"), ("<", "/"), ("</", "s"), ("</s", ">")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=pieces[0]))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    library.add_special_tokens(
        ["<unk>", "</s>", AddedToken("<u>", rstrip=True, normalized=False, special=True)]
    )
    library.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}<u>\n{{ m.content }}</s>{% endfor %}"
    config = {"chat_template": template, "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("text", ["hi hi", "hi<u> \n hi</s>hi", "<u>hi", "", "hi\u00e9"])
def test_runs_between_special_tokens_give_the_ids_of_the_whole(
    tmp_path: Path, scheme: str, text: str
) -> None:
    directory = sentencepiece_model(tmp_path, scheme)
    tokenizer = HFTokenizer(directory)
    ids = []
    for span in SpecialText(tokenizer.special_tokens).split(text):
        run = text[span.start : span.end]
        plain = tokenizer.encode_plain(run, is_start=span.start == 0)
        ids += plain if span.token is None else [span.token]
    assert ids == Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids


def test_a_vocabulary_that_can_spell_its_end_token_does_not(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(sentencepiece_model(tmp_path, "never"))
    assert tokenizer.encode("</s>") == [1]
    ids = tokenizer.encode_plain("hi</s>")
    assert tokenizer.eos_ids.isdisjoint(ids)
    assert decode(tokenizer, ids) == "hi</s>"


def test_templates_that_swallow_white_space_are_rendered_alike(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(sentencepiece_model(tmp_path, "first"))
    prompt = render(ChatRequest("m", (Message.of(Role.USER, "hi </s>"),)), tokenizer)
    assert prompt.tokens[0] == 2
    assert prompt.tokens[-1] == 1
    assert list(prompt.tokens).count(1) == 1


def test_unsupported_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="WordPiece"):
        HFTokenizer(
            write_model(tmp_path, {"type": "WordPiece", "prefix": "##", "cleanup": True}, "")
        )
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        HFTokenizer(tmp_path)
