"""Chat templates: what untrusted Jinja may do, and how its errors are reported."""

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from semantic.adapters.outbound.limited_process import ProcessLimits
from semantic.adapters.outbound.models.chat_template import ChatTemplate
from semantic.domain.chat import JsonObject
from semantic.domain.errors import InvalidRequestError
from tests.templates import HOSTILE
from tests.waiting import await_that

pytestmark = pytest.mark.unit

MESSAGES: list[JsonObject] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
]


def rendered(source: str) -> str:
    return ChatTemplate(source, {}).render(
        MESSAGES, (), add_generation_prompt=True, today=None, is_thinking=None
    )


@pytest.mark.parametrize(
    "source, reason",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages | length + 'a' }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages[0].missing() }}", "missing"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ messages.clear() }}", "clear"),
        ("{{ 2.0 ** 100000 }}", "range|large"),
        ("{{ 'é'.encode('ascii') }}", "ascii"),
        ("{% include 'other' %}", "loader"),
        ("{{ strftime_now(1) }}", "strftime"),
        ("{{ ([] | first).x }}", "empty"),
        ("{{ '%d' | format('a') }}", "number"),
        ("{{ namespace(1) }}", "not iterable"),
        ("{{ dict(a=1).popitem() }}", "popitem"),
        ("{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}", "unsafe"),
        ("{% for m in messages %}{{ loop.cycle.__globals__.x }}{% endfor %}", "unsafe"),
        ("{{ namespace(a=1).__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_whatever_a_template_raises_refuses_the_conversation(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        rendered(source)
    assert caught.value.param == "messages"


def test_templates_of_published_models_use_these_filters_and_methods() -> None:
    assert rendered("{{ 'é' | tojson(ensure_ascii=False) }}") == '"é"'
    assert rendered("{{ 'é' | tojson(ensure_ascii=True) }}") == '"\\u00e9"'
    assert rendered("{{ ('[1, 2]' | from_json)[1] }}") == "2"
    source = "{% set a = [1] %}{% set _ = a.append(2) %}{{ a.pop(0) }}{{ a }}"
    assert rendered(source) == "1[2]"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | unheard_of }}", "{{" + "(" * 5000])
def test_a_template_that_cannot_be_compiled_is_the_models_fault(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="not valid") as caught:
        ChatTemplate(source, {})
    assert caught.value.param == "model"


def test_what_training_marks_as_generated_is_shown_as_it_is() -> None:
    source = (
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}"
        "{% generation %}\n<a>{{ m.content }}{% set m = none %}</a>{% endgeneration %}"
        "{{ m.role }}"
        "{%- else %}<u>{{ m.content }}</u>{% endif %}"
        "{% endfor %}"
    )
    assert rendered(source) == "<u>hi</u><a>hello</a>assistant"


LIMITS = ProcessLimits(cpu_s=0.3, memory=128 * 2**20)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_template_that_takes_too_much_refuses_the_conversation(what: str) -> None:
    template = ChatTemplate(HOSTILE[what], {}, LIMITS)
    with pytest.raises(InvalidRequestError, match=r"chat template exceeds 0\.3 s or 128 MB"):
        template.render(MESSAGES)


def test_a_bystander_is_answered_while_eight_conversations_take_too_much() -> None:
    template = ChatTemplate(
        "{% if messages[0].content == 'loop' %}" + HOSTILE["loops"] + "{% endif %}"
        "{{ messages[0].content }}",
        {},
        LIMITS,
    )

    def say(content: str) -> str:
        try:
            return template.render([{"role": "user", "content": content}])
        except InvalidRequestError as error:
            return "refused" if "exceeds" in error.message else error.message

    said = ["loop"] * 8 + ["hi"] * 4
    with ThreadPoolExecutor(len(said)) as threads:
        answers = list(threads.map(say, said))
    assert answers == ["refused"] * 8 + ["hi"] * 4


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_costly_part_is_charged_only_to_conversations_that_reach_it(kind: str) -> None:
    source = "{% if messages[0].content == 'loop' %}" + HOSTILE[kind] + "{% endif %}"
    template = ChatTemplate(source + "{{ messages[0].content }}", {}, LIMITS)
    assert template.render(MESSAGES) == "hi"


def test_a_process_that_was_killed_while_idle_refuses_nothing() -> None:
    others = set(psutil.Process().children())
    template = ChatTemplate("{{ messages[0].content }}", {}, LIMITS)
    assert template.render(MESSAGES) == "hi"
    (process,) = set(psutil.Process().children()) - others
    process.kill()
    await_that(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert template.render(MESSAGES) == "hi"


TOOL: JsonObject = {"type": "function", "function": {"name": "é"}}
SYSTEM: JsonObject = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "source, messages, shown",
    [
        ("{{ tools[0].function.name }}", MESSAGES, "é"),
        ("{{ xml_tools[0].function.name }}", MESSAGES, "é"),
        ("{{ messages[0]['tools'] }}", [SYSTEM, *MESSAGES], '[{"name": "é"}]'),
        ("{{ messages[0].role ~ messages[0].tools }}", MESSAGES, 'system[{"name": "é"}]'),
        ("{{ 'tools' in messages[0] and messages[0].tools ~ tools }}", MESSAGES, "False"),
    ],
)
def test_a_template_gets_the_tools_where_it_reads_them(
    source: str, messages: list[JsonObject], shown: str
) -> None:
    assert ChatTemplate(source, {}).render(messages, [TOOL]) == shown


@pytest.mark.parametrize("source", ["{{ xml_tools is defined }}", "{{ 'tools' in messages[0] }}"])
def test_without_tools_a_template_gets_none(source: str) -> None:
    assert rendered(source) == "False"
