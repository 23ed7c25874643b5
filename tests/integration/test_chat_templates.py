"""Conversations through templates of real shape and the starter model's real vocabulary."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.prompt.compose import calls_text
from semantic.application.prompt.renderer import Prompt, Renderer
from semantic.application.prompt.replay import (
    ReplayStore,
    TenantReplays,
    emitted_tokens,
    keys_to_remember,
    prompt_digest,
)
from semantic.application.prompt.special_text import SpecialText
from semantic.domain.chat import (
    ChatRequest,
    Message,
    Role,
    TextPart,
    Thinking,
    ThinkingPart,
    ToolSpec,
    ToolUsePart,
)
from tests.conversations import READ, coding, results, say, text_result, use
from tests.templates import TEMPLATES, write_model

pytestmark = pytest.mark.integration

TODAY = date(2026, 3, 1)
ROOT = b"root"
STARTER = "starter"


class RecordingTokenizer(HFTokenizer):
    """Keeps the text it rendered last."""

    text = ""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        render = self.render_chat

        def record(*messages: Any, **options: Any) -> str:
            self.text = render(*messages, **options)
            return self.text

        self.render_chat = record


Loaded = tuple[RecordingTokenizer, Tokenizer]
Models = dict[str, Loaded]


class Model:
    """A template with its tokenizer, and a book of what it said."""

    def __init__(self, loaded: Loaded) -> None:
        self.tokenizer, self.reference = loaded
        self.renderer = Renderer(self.tokenizer)
        self.book = ReplayStore()
        (self.end,) = self.tokenizer.eos_ids

    def prompt(self, request: ChatRequest) -> Prompt:
        return self.renderer.render(request, today=TODAY, replays=TenantReplays(ROOT, self.book))

    def sample(self, text: str) -> list[int]:
        """Tokens as a model might choose them: not those an encoder would."""
        pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
        return [token for piece in pieces for token in self.tokenizer.encode_plain(piece)]

    def remember(self, prompt: Prompt, reply: Message, tokens: Sequence[int]) -> None:
        for key in keys_to_remember(prompt_digest(ROOT, prompt.tokens), reply):
            self.book.remember(key, tokens)


@pytest.fixture(scope="module")
def models(starter_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    directories = {STARTER: starter_model_dir}
    for name in TEMPLATES:
        directory = tmp_path_factory.mktemp(name)
        directories[name] = write_model(directory, starter_model_dir / "tokenizer.json", name)
    return {
        name: (RecordingTokenizer(path), Tokenizer.from_file(str(path / "tokenizer.json")))
        for name, path in directories.items()
    }


@pytest.fixture(params=[STARTER, *TEMPLATES])
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return Model(models[request.param])


@pytest.fixture
def qwen(models: Models) -> Model:
    return Model(models["qwen"])


def ask(*messages: Message, tools: tuple[ToolSpec, ...] = ()) -> ChatRequest:
    return ChatRequest("m", messages, tools)


def user(text: str) -> Message:
    return Message.of(Role.USER, text)


def written(message: Message) -> str:
    """What a model samples to say this."""
    thoughts = [
        f"<think>\n{part.text}\n</think>\n\n"
        for part in message.parts
        if isinstance(part, ThinkingPart)
    ]
    calls = [(p.name, p.arguments) for p in message.parts if isinstance(p, ToolUsePart)]
    return "".join(thoughts) + message.text + (calls_text(calls) if calls else "")


# -- the same ids as the whole text gives -------------------------------------------------------


@pytest.mark.parametrize("number", range(7))
def test_ids_are_those_of_the_whole_text(model: Model, number: int) -> None:
    model.renderer.render(coding()[number].request, today=TODAY)
    # What the renderer must find out of a head is known by now.
    prompt = model.renderer.render(coding()[number].request, today=TODAY)
    text = SpecialText.reveal(model.tokenizer.text)
    assert list(prompt.tokens) == model.reference.encode(text, add_special_tokens=False).ids


def test_ids_are_those_of_the_whole_text_for_any_conversation(models: Models) -> None:
    made = [Model(models[name]) for name in (STARTER, "gemma", "llama")]
    pieces = st.sampled_from(["<", ">", "|", "im_", " ", "\n", "\n\n", "é", "漢", "a", "'s", "12"])
    texts = st.lists(pieces, max_size=12).map("".join)

    @given(texts, texts)
    def check(question: str, answer: str) -> None:
        request = ask(user(question), Message.of(Role.ASSISTANT, answer), user("ok"))
        for model in made:
            model.renderer.render(request, today=TODAY)
            prompt = model.renderer.render(request, today=TODAY)
            text = SpecialText.reveal(model.tokenizer.text)
            ids = model.reference.encode(text, add_special_tokens=False).ids
            assert list(prompt.tokens) == ids

    check()


# -- special tokens are the template's ----------------------------------------------------------


def specials(model: Model, prompt: Prompt) -> list[int]:
    ids = {token.id for token in model.tokenizer.special_tokens}
    return [token for token in prompt.tokens if token in ids]


def spoken(model: Model, prompt: Prompt) -> str:
    return decoded(model, prompt.tokens)


def decoded(model: Model, tokens: Sequence[int]) -> str:
    return b"".join(map(model.tokenizer.token_bytes, tokens)).decode()


def conversation_saying(text: str) -> ChatRequest:
    call = ToolUsePart("t1", "Read", {"path": text, text: [text]})
    tool = ToolSpec("Read", text, {"type": "object", "properties": {text: {"title": text}}})
    return ask(
        Message.of(Role.SYSTEM, text),
        user(text),
        Message(Role.ASSISTANT, (ThinkingPart(text), TextPart(text), call)),
        results(text_result("t1", text)),
        say(text),
        Message.of(Role.SYSTEM, text),
        user(text),
        tools=(tool,),
    )


@pytest.mark.parametrize("around", ["{}", "  {}\n", "a {} b", "{0}{0}"])
def test_what_clients_write_never_becomes_a_special_token(model: Model, around: str) -> None:
    plain = model.renderer.render(conversation_saying("harmless"), today=TODAY)
    for token in model.tokenizer.special_tokens:
        request = conversation_saying(around.format(token.text))
        prompt = model.renderer.render(request, today=TODAY)
        assert specials(model, prompt) == specials(model, plain)
        assert spoken(model, prompt).count(token.text) >= 4
        assert max(prompt.tokens) < model.tokenizer.vocab_size


def test_halves_of_special_tokens_do_not_join(model: Model) -> None:
    plain = model.renderer.render(conversation_saying("harmless"), today=TODAY)
    (end,) = (t.text for t in model.tokenizer.special_tokens if t.id == model.end)
    for cut in range(1, len(end)):
        for half in (end[:cut], end[cut:]):
            prompt = model.renderer.render(conversation_saying(half), today=TODAY)
            assert specials(model, prompt) == specials(model, plain)


# -- each turn extends the last -----------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({STARTER, *TEMPLATES} - {"parts"}))
def test_every_turn_extends_the_last_prompt_and_reply(models: Models, name: str) -> None:
    model, before = Model(models[name]), tuple[int, ...]()
    for number, exchange in enumerate(coding()):
        prompt = model.prompt(exchange.request)
        assert prompt.num_replayed == number
        assert prompt.tokens[: len(before)] == before
        assert len(prompt.tokens) > len(before)
        sampled = [*model.sample(written(exchange.reply)), model.end]
        model.remember(prompt, exchange.reply, sampled)
        before = (*prompt.tokens, *sampled)


def test_a_template_without_an_end_token_replays_text(models: Models) -> None:
    model = Model(models["parts"])
    prompt = model.prompt(ask(user("hi")))
    sampled = model.sample("Hello there.")
    model.remember(prompt, say("Hello there."), [*sampled, model.end])
    second = model.prompt(ask(user("hi"), say("Hello there."), user("ok")))
    whole = (*prompt.tokens, *sampled)
    assert second.tokens[: len(whole)] == whole
    assert model.end not in second.tokens


def test_every_turn_extends_the_last_prompt_without_a_book(model: Model) -> None:
    before: tuple[int, ...] = ()
    for exchange in coding():
        prompt = model.renderer.render(exchange.request, today=TODAY)
        assert prompt.tokens[: len(before)] == before
        # What follows the generation prompt may merge with the white space at its end.
        before = prompt.tokens[:-1]


def test_the_head_is_the_same_for_all_and_ends_at_a_boundary(model: Model) -> None:
    request = coding()[0].request
    texts = ("Hello", "What else?", "漢字", "1")
    requests = [replace(request, messages=(request.messages[0], user(text))) for text in texts]
    prompts = [model.renderer.render(asked, today=TODAY) for asked in requests]
    (num_head,) = {prompt.num_head for prompt in prompts}
    (head,) = {prompt.tokens[:num_head] for prompt in prompts}
    assert all(num_head in prompt.boundaries for prompt in prompts)
    assert all(prompt.boundaries[-1] == len(prompt.tokens) for prompt in prompts)
    shared = decoded(model, head)
    assert "You are a coder." in shared
    assert '"ToolSearch"' in shared
    before = spoken(model, prompts[0]).rpartition(texts[0])[0]
    assert before.startswith(shared)
    assert not before[len(shared) :].strip()


# -- tools, system messages, dates --------------------------------------------------------------


def test_every_message_is_rendered_in_order(model: Model) -> None:
    text = spoken(model, model.renderer.render(coding()[-1].request, today=TODAY))
    position = 0
    for words in (
        "You are a coder.", "client.py follow", "ToolSearch", "WebFetch", "http://x/é",
        "the docs", "f( x )", "opened client.py", "both files", "a.py", "b.py", "a = 1",
        "Error: no such file", "be quick", "Only a.py", "c.py", "Little context", "Fine.",
    ):  # fmt: skip
        assert words in text[position:], words
        position = text.index(words, position)
    assert "NotebookEdit" not in text


def test_deferred_tools_are_shown_where_they_are_named(model: Model) -> None:
    exchanges = coding()
    first, second = (model.renderer.render(e.request, today=TODAY) for e in exchanges[:2])
    assert "Fetch a page." not in spoken(model, first)
    text = spoken(model, second)
    assert text.count("Fetch a page.") == 1
    assert text.index("Fetch a page.") > text.index("client.py follow")
    assert first.tokens[: first.num_head] == second.tokens[: second.num_head]


@pytest.mark.parametrize("name", ["qwen", "llama", "mistral_head"])
def test_templates_with_tools_show_them_their_own_way(models: Models, name: str) -> None:
    model = Model(models[name])
    prompt = model.renderer.render(coding()[2].request, today=TODAY)
    assert not prompt.has_tool_markup
    assert "These are available" not in spoken(model, prompt)


@pytest.mark.parametrize("name", [STARTER, "chatml", "mistral", "gemma", "parts"])
def test_other_templates_get_the_tool_prompt(models: Models, name: str) -> None:
    model = Model(models[name])
    prompt = model.renderer.render(coding()[2].request, today=TODAY)
    text = spoken(model, prompt)
    assert prompt.has_tool_markup
    assert text.index("These are available") < text.index("You are a coder.")
    assert '<tool_call>\n{"name": "WebFetch", "arguments": {"timeout": 1000' in text
    assert "<tool_response>\n<html> the docs </html>\n\n</tool_response>" in text


# -- exact replay -------------------------------------------------------------------------------


def two_turns(model: Model, reply: Message, echo: Message, *more: Message) -> tuple[bool, Prompt]:
    """Say `reply`, be told `echo`; returns whether the second prompt extends the first turn."""
    first = ask(user("hi"), tools=(READ,))
    prompt = model.prompt(first)
    sampled = model.sample(written(reply))
    model.remember(prompt, reply, [*sampled, model.end])
    messages = (*first.messages, echo, *(more or (user("ok"),)))
    second = model.prompt(replace(first, messages=messages))
    whole = (*prompt.tokens, *sampled, model.end)
    assert second.tokens[: len(prompt.tokens) - 1] == prompt.tokens[:-1]
    is_extended = second.tokens[: len(whole)] == whole
    assert second.num_replayed == int(is_extended)
    return is_extended, second


SAID = say("Hello  there", use("t1", "Read", path="é\n", limit=1000.0))


THOUGHT = Message(Role.ASSISTANT, (ThinkingPart("hmm", "sig"), TextPart("Yes.")))
OTHER_THOUGHT = Message(Role.ASSISTANT, (ThinkingPart("edited"), TextPart("Yes.")))
IN_LOOP = (results(text_result("t1", "x")),)


@pytest.mark.parametrize(
    "reply,echo,more,is_replayed",
    [
        (SAID, SAID, IN_LOOP, True),
        (SAID, say("Hello  there", use("o", "Read", limit=1000, path="\u00e9\n")), IN_LOOP, True),
        (SAID, say("Hello  there", use("t1", "Read", path="é\n", limit="1000")), IN_LOOP, False),
        (SAID, say("Hello  there"), IN_LOOP, False),
        (THOUGHT, THOUGHT, (), True),  # echoed, though the template drops old thinking
        (THOUGHT, OTHER_THOUGHT, (), False),
        (THOUGHT, say("Yes."), (), False),  # dropped by both: the prompt goes on without it
        (THOUGHT, say("Yes."), IN_LOOP, True),  # the template shows it here
    ],
)
def test_a_reply_with_the_same_text_is_replayed(
    qwen: Model, reply: Message, echo: Message, more: tuple[Message, ...], is_replayed: bool
) -> None:
    was_extended, second = two_turns(qwen, reply, echo, *more)
    assert was_extended == is_replayed
    if reply is THOUGHT:
        assert ("hmm" in spoken(qwen, second)) == is_replayed


def test_templates_that_know_no_thinking_leave_it_out(models: Models) -> None:
    model = Model(models["chatml"])
    _, second = two_turns(model, THOUGHT, OTHER_THOUGHT)
    assert "edited" not in spoken(model, second)
    assert "hmm" not in spoken(model, second)


def test_a_prompt_that_later_turns_do_not_keep_has_a_boundary_before(qwen: Model) -> None:
    request = replace(ask(user("hi")), thinking=Thinking(is_enabled=False))
    prompt = qwen.prompt(request)
    later = qwen.prompt(replace(request, messages=(user("hi"), say("Hello"), user("ok"))))
    num_kept = prompt.boundaries[-2]
    assert prompt.num_head < num_kept < len(prompt.tokens)
    assert later.tokens[:num_kept] == prompt.tokens[:num_kept]
    assert later.tokens[num_kept] != prompt.tokens[num_kept]


def test_a_reply_cut_short_is_ended_by_the_template(qwen: Model) -> None:
    first = ask(user("hi"))
    prompt = qwen.prompt(first)
    sampled = qwen.sample("Once upon a")
    qwen.remember(prompt, say("Once upon a"), sampled)
    second = qwen.prompt(ask(*first.messages, say("Once upon a"), user("ok")))
    whole = (*prompt.tokens, *sampled, qwen.end)
    assert second.tokens[: len(whole)] == whole


@pytest.mark.parametrize("stop", [" more", "re", "é"])
def test_a_reply_ended_by_a_stop_string_replays_what_was_emitted(models: Models, stop: str) -> None:
    model = Model(models[STARTER])
    prompt = model.prompt(ask(user("hi")))
    said = "Tell me no"
    sampled = model.sample(said) + model.tokenizer.encode_plain(" more café")
    emitted = (said + " more café").partition(stop)[0]
    kept = emitted_tokens(sampled, emitted, model.tokenizer)
    assert decoded(model, kept) == emitted
    assert list(kept[: len(model.sample(said))]) == model.sample(said)
    model.remember(prompt, say(emitted), kept)
    second = model.prompt(ask(user("hi"), say(emitted), user("ok")))
    whole = (*prompt.tokens, *kept, model.end)
    assert second.tokens[: len(whole)] == whole


# -- the date -----------------------------------------------------------------------------------


def test_only_a_template_with_a_date_shows_it(model: Model, models: Models) -> None:
    days = (TODAY, TODAY + timedelta(1))
    first, second = (model.renderer.render(ask(user("hi")), today=day).tokens for day in days)
    shows_date = model.tokenizer is models["llama"][0]
    assert model.renderer.traits.shows_date == shows_date
    assert (first != second) == shows_date
