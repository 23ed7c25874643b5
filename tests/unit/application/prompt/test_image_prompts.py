"""Prompts with images, by templates that show them in different ways."""

import hashlib
from dataclasses import replace

import pytest

from semantic.adapters.outbound.backends.fake import FakeVisionTokenizer
from semantic.adapters.outbound.backends.fake_vision import FakeVision
from semantic.application.prompt.images import ImagePreparer
from semantic.application.prompt.renderer import Prompt, Renderer
from semantic.application.prompt.replay import (
    ReplayStore,
    TenantReplays,
    keys_to_remember,
    prompt_digest,
)
from semantic.domain.chat import (
    ChatRequest,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
    images_in,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.images.spans import PreparedImage, is_image_id
from semantic.ports.text import TokenizerPort
from tests.picture_prompts import fake_picture
from tests.template_rig import TemplateTokenizer

pytestmark = pytest.mark.unit

# Content is a string or a list; as in Qwen's templates, results are shown like other messages.
EVERYWHERE = """
{%- for tool in tools or [] %}<|tool|>{{ tool.function | tojson }}
{%- endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'image' %}<|vision|><|image|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}<|call|>{{ call.function | tojson }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Content must be a list, and results are text.
IN_USER_MESSAGES = EVERYWHERE.replace(
    "{% if m.content is string %}{{ m.content }}{% else %}",
    "{% if m.content is string %}{{ raise_exception('no') }}{% else %}",
).replace("{%- if part.type == 'image' %}", "{%- if part.type == 'image' and m.role == 'user' %}")


def tokenizer_of(source: str) -> TemplateTokenizer:
    return TemplateTokenizer(source, ("<|im_end|>",))


TOKENIZERS: dict[str, TokenizerPort] = {
    "a marker in the text": FakeVisionTokenizer(),
    "parts": tokenizer_of(EVERYWHERE),
    "parts in user messages": tokenizer_of(IN_USER_MESSAGES),
}
READ = ToolSpec("read", "Reads.", {"type": "object", "properties": {}})


def image(seed: int, size: tuple[int, int] = (128, 96)) -> ImagePart:
    data = fake_picture(seed, size)
    return ImagePart(hashlib.sha256(data).hexdigest(), "image/png", *size, data)


def user(*parts: Part | str) -> Message:
    return Message(Role.USER, tuple(TextPart(p) if isinstance(p, str) else p for p in parts))


def result(*content: TextPart | ImagePart) -> Message:
    return Message(Role.TOOL, (ToolResultPart("c", content),))


CALLING = Message(Role.ASSISTANT, (ToolUsePart("c", "read", {}),))


class Bench:
    """Renders with one tokenizer, and shows prompts as text."""

    def __init__(self, tokenizer: TokenizerPort) -> None:
        self.tokenizer = tokenizer
        self.vision = FakeVision(tokenizer.special_ids["<|image|>"])
        self.renderer = Renderer(tokenizer, self.vision.marker_id)
        self.preparer = ImagePreparer(lambda *_: None)

    def render(
        self, *messages: Message, tools: tuple[ToolSpec, ...] = (), store: ReplayStore | None = None
    ) -> Prompt:
        request = ChatRequest("m", messages, tools)
        replays = TenantReplays(b"root", store) if store else None
        return self.renderer.render(request, replays=replays, images=self.prepared(*messages))

    def prepared(self, *messages: Message) -> tuple[PreparedImage, ...]:
        images = list(images_in(messages))
        return self.preparer.prepare(images, "local", self.vision, is_kept=True, max_tokens=9999)

    def shown(self, *messages: Message, tools: tuple[ToolSpec, ...] = ()) -> str:
        """The text, with {n} in place of the image number n."""
        prompt = self.render(*messages, tools=tools)
        check_spans(prompt, self.prepared(*messages))
        texts = {token.id: token.text.encode() for token in self.tokenizer.special_tokens}
        pieces = [texts.get(t) or self.tokenizer.token_bytes(t) for t in prompt.tokens]
        for number, span in enumerate(prompt.images):
            pieces[span.start] = b"{%d}" % number
            pieces[span.start + 1 : span.end] = [b""] * (span.end - span.start - 1)
        return b"".join(pieces).decode()


def check_spans(prompt: Prompt, images: tuple[PreparedImage, ...]) -> None:
    assert [span.image for span in prompt.images] == list(images)
    for span in prompt.images:
        assert prompt.tokens[span.start : span.end] == span.tokens
        assert {span.start, span.end} <= set(prompt.boundaries)
    inside = {place for span in prompt.images for place in span.feature_positions}
    assert inside == {i for i, token in enumerate(prompt.tokens) if is_image_id(token)}


@pytest.fixture(params=TOKENIZERS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(TOKENIZERS[request.param])


def test_images_stand_where_the_client_put_them(bench: Bench) -> None:
    text = bench.shown(user("one", image(1), "two", "three", image(2), image(1)), user("four"))

    # The line break after each image is the model's own.
    assert "one{0}\ntwo\nthree{1}\n{2}\n" in text.replace("<|vision|>", "")
    assert "<|image|>" not in text


def test_images_of_tool_results_are_shown(bench: Bench) -> None:
    text = bench.shown(
        user("look", image(1)),
        CALLING,
        result(TextPart("done"), image(2)),
        user("and?", image(3)),
        tools=(READ,),
    )

    places = [text.index(what) for what in ("look", "{0}", "done", "{1}", "and?", "{2}")]
    assert places == sorted(places)


def test_a_result_with_an_image_at_the_end_of_a_prompt_stays_when_the_reply_follows(
    bench: Bench,
) -> None:
    first = [user("look"), CALLING, result(image(1))]
    asked = bench.render(*first, tools=(READ,))
    later = bench.render(*first, Message.of(Role.ASSISTANT, "A cat."), user("?"), tools=(READ,))

    assert later.tokens[: len(asked.tokens)] == asked.tokens


def test_an_image_marker_in_text_is_text(bench: Bench) -> None:
    prompt = bench.render(user("<|image|> and \ufdd0\ufdd4", image(1)))

    check_spans(prompt, bench.prepared(user(image(1))))
    assert len(prompt.images) == 1


def test_replies_after_images_are_replayed(bench: Bench) -> None:
    asked, store = user("what?", image(1)), ReplayStore()
    reply = Message.of(Role.ASSISTANT, "xyz")
    before = bench.render(asked, store=store)
    sampled = [*b"xy", *b"z", *bench.tokenizer.eos_ids]
    for key in keys_to_remember(prompt_digest(b"root", before.tokens), reply):
        store.remember(key, sampled)

    again = bench.render(asked, reply, user("and?"), store=store)
    other = bench.render(user("what?", image(2)), reply, user("and?"), store=store)

    assert again.num_replayed == 1
    assert again.tokens[: len(before.tokens)] == before.tokens
    assert other.num_replayed == 0


def test_marks_count_the_tokens_of_images(bench: Bench) -> None:
    messages = (user("a", image(1)), Message.of(Role.ASSISTANT, "b"), user("c", image(2)))
    plain = bench.render(*messages)
    for number in (1, 2, 3):
        request = ChatRequest("m", messages, num_marked=number)
        marked = bench.renderer.render(request, images=bench.prepared(*messages))
        assert marked.tokens == plain.tokens
        first, second = plain.images
        expected = (first.end, first.end, second.end)[number - 1]
        assert expected <= marked.num_marked <= expected + 60
        assert (marked.num_marked > second.start) == (number == 3)


def test_the_beginning_of_a_prompt_never_ends_inside_an_image(bench: Bench) -> None:
    prompt = bench.render(user("a", image(1), "b", image(2)))
    first, second = prompt.images

    cut = prompt.cut(second.start + 1)

    assert len(cut.tokens) == second.start == cut.boundaries[-1]
    assert cut.images == (first,)
    assert prompt.cut(len(prompt.tokens)) == prompt


def test_a_template_that_drops_an_image_refuses_it() -> None:
    source = EVERYWHERE.replace("{%- for m in messages %}", "{%- for m in messages[-1:] %}")
    bench = Bench(tokenizer_of(source))

    with pytest.raises(InvalidRequestError, match="shows 1 of 2 images"):
        bench.render(user(image(1)), Message.of(Role.ASSISTANT, "b"), user(image(2)))


def test_an_image_is_prepared_once_for_each_tenant_and_read_from_the_ledger() -> None:
    files = {"a": image(1).data}
    reads: list[str] = []

    def read(tenant: str, _: str) -> bytes | None:
        reads.append(tenant)
        return files.get(tenant)

    preparer, vision = ImagePreparer(read), FakeVision(258)
    stored = replace(image(1), data=b"")
    for _ in range(2):
        prepared = preparer.prepare([stored], "a", vision, is_kept=True, max_tokens=9999)
        assert prepared == (vision.prepare(image(1).data),)
    assert reads == ["a"]
    with pytest.raises(InvalidRequestError, match="no longer stored"):
        preparer.prepare([stored], "b", vision, is_kept=True, max_tokens=9999)
    other = ImagePreparer(read)
    for _ in range(2):
        other.prepare([stored], "a", vision, is_kept=False, max_tokens=9999)
    assert reads == ["a", "b", "a", "a"]


def test_images_beyond_the_context_are_counted_without_their_pixels() -> None:
    preparer, vision = ImagePreparer(lambda *_: None), FakeVision(258)
    images = [image(1), image(2), image(1)]
    whole = [vision.prepare(each.data) for each in images]
    limit = len(whole[0].tokens) + len(whole[1].tokens)
    for _ in range(2):
        found = preparer.prepare(images, "a", vision, is_kept=True, max_tokens=limit)
        assert list(found) == whole
        assert [each.nbytes for each in found] == [whole[0].nbytes, whole[1].nbytes, 0]
        assert {each.tenant for each in found} == {"a"}
