"""The agent API over a socket, on the fake backend."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from semantic.domain.agents import TOOL_NAME
from tests.http_server import RunningServer
from tests.unit.application.device_rig import hold
from tests.waiting import await_that

pytestmark = pytest.mark.integration

SETTINGS = {"default_max_tokens": 20}

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
ENDLESS = 100_000  # tokens; the tests do not wait for the end


@pytest.fixture
def http(running: RunningServer) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client
        for agent in client.get("/v1/agents", params={"limit": 100}).json()["data"]:
            client.delete(f"/v1/agents/{agent['id']}")


def make(http: httpx.Client, **settings: Any) -> dict[str, Any]:
    answer = http.post("/v1/agents", json=settings)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def say(http: httpx.Client, agent_id: str, message: str, **options: Any) -> dict[str, Any]:
    body = {"message": message, **GREEDY, **options}
    answer = http.post(f"/v1/agents/{agent_id}/generate", json=body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def get(http: httpx.Client, path: str, **params: Any) -> Any:
    answer = http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


def data_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return data_of(answer.text.splitlines())


@contextlib.contextmanager
def going_on(http: httpx.Client, agent_id: str, **options: Any) -> Iterator[Iterator[str]]:
    """A reply that has begun and does not end in time; yields its lines."""
    body = {"message": "q0", **GREEDY, "max_tokens": ENDLESS, "stream": True, **options}
    with http.stream("POST", f"/v1/agents/{agent_id}/generate", json=body) as answer:
        lines = answer.iter_lines()  # a generator that is dropped closes the stream
        next(lines)
        yield lines


def texts(turns: list[dict[str, Any]]) -> list[str]:
    messages = [message for turn in reversed(turns) for message in turn["messages"]]
    return ["".join(part["text"] for part in message["content"]) for message in messages]


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# -- agents -----------------------------------------------------------------------------------


def test_an_agent_is_made_found_changed_and_deleted(http: httpx.Client) -> None:
    tool = {"name": "read", "description": "a file", "parameters": {"type": "object"}}
    settings = {
        "system": "be brief",
        "tools": [{**tool, "strict": True}],
        "model": "fake",
        "class": "background",
        "weight": 2.5,
        "pin": True,
        "ttl_s": 60.0,
        "quota": {"max_bytes": 10**9, "max_turns": 5},
        "overflow": "drop_oldest",
        "labels": {"team": "red"},
    }

    made, other = make(http, id="coder", **settings), make(http)

    assert made["settings"] == settings
    assert other["id"] not in ("coder", make(http)["id"])
    assert get(http, "/v1/agents/coder") == made
    patched = http.patch("/v1/agents/coder", json={"pin": False, "labels": {}, "system": None})
    assert patched.json()["settings"] == {**settings, "pin": False, "labels": {}, "system": None}
    assert http.delete("/v1/agents/coder").status_code == 204
    assert error_of(http.get("/v1/agents/coder")) == (404, "agent_not_found")
    assert error_of(http.delete("/v1/agents/coder")) == (404, "agent_not_found")


def test_an_id_asked_for_many_times_at_once_is_made_once(http: httpx.Client) -> None:
    def ask(number: int) -> int:
        body = {"id": "rush", "system": f"s{number % 4}"}
        return http.post("/v1/agents", json=body).status_code

    with ThreadPoolExecutor(16) as threads:
        statuses = list(threads.map(ask, range(16)))

    assert sorted(statuses) == [200] * 3 + [201] + [409] * 12
    assert get(http, "/v1/agents", prefix="rush")["total"] == 1


@pytest.mark.parametrize(
    "settings, param",
    [
        ({"id": "no spaces"}, "id"),
        ({"id": ""}, "id"),
        ({"id": "x" * 129}, "id"),
        ({"id": ".."}, "id"),
        ({"weight": 0}, "weight"),
        ({"weight": "1"}, "weight"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"class": "royal"}, "class"),
        ({"overflow": "burst"}, "overflow"),
        ({"systems": "misspelled"}, "systems"),
        ({"system": "half \ud800"}, "system"),
        ({"tools": [{"name": "t", "parameters": {"a": float("nan")}}]}, "tools[0].parameters"),
        ({"quota": {"max_turns": -1}}, "quota.max_turns"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    http: httpx.Client, settings: dict[str, Any], param: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/agents", content=json.dumps(settings), headers=headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


NO_ID = "an agent id must be 1 to 128 of the characters A-Z a-z 0-9 . _ -, and not only dots."


@pytest.mark.parametrize(
    "method, path, body, message",
    [
        ("GET", "/no%20spaces", None, f"agent_id: {NO_ID}"),
        ("POST", "/a/fork", {"ids": ["b", "no spaces"]}, f"ids[1]: {NO_ID}"),
        ("POST", "/import?id=..", None, f"id: {NO_ID}"),
        ("POST", "", {"tools": [{"name": "a b"}]}, f"tools[0].name: it must match {TOOL_NAME!r}"),
        ("GET", "?limit=many", None, "limit: it must be a valid integer"),
    ],
    ids=["path", "list", "query", "tool", "number"],
)
def test_a_refusal_names_the_allowed_values(
    http: httpx.Client, method: str, path: str, body: dict[str, Any] | None, message: str
) -> None:
    answer = http.request(method, f"/v1/agents{path}", json=body)
    said = answer.json()["error"]["message"].replace("match pattern", "match")
    assert (answer.status_code, said) == (400, message)


def test_agents_are_listed_in_pages_in_any_order(http: httpx.Client) -> None:
    for name in ("b", "d", "a", "e", "c"):
        make(http, id=name, labels={"kind": "vowel" if name in "ae" else "consonant"})
    say(http, "d", "hello")

    def ids(**params: Any) -> list[str]:
        found: list[str] = []
        page: dict[str, Any] = {"next": ""}
        while page["next"] is not None:
            after = {"after": page["next"]} if page["next"] else {}
            page = get(http, "/v1/agents", limit=2, **params, **after)
            found += [agent["id"] for agent in page["data"]]
        assert page["total"] == len(found)
        return found

    assert ids(sort="id", order="asc") == ["a", "b", "c", "d", "e"]
    assert ids(sort="created_at", order="asc") == ["b", "d", "a", "e", "c"]
    assert ids(sort="turns")[0] == ids()[0] == "d"
    assert ids(sort="id", order="asc", label="kind:vowel") == ["a", "e"]
    assert ids(prefix="c") == ["c"]
    assert ids(pin="true") == []
    assert error_of(http.get("/v1/agents", params={"after": "bogus"}))[0] == 400
    assert error_of(http.get("/v1/agents", params={"label": "kind"}))[0] == 400


def test_an_unnamed_agent_is_listed_from_its_second_turn_on(http: httpx.Client) -> None:
    said = [{"role": "user", "content": "one question, asked once"}]

    def ask() -> str:
        body = {"model": "fake", "messages": said, "max_tokens": 8, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body)
        return str(answer.json()["choices"][0]["message"]["content"])

    def listed(**params: Any) -> list[str]:
        return [agent["id"] for agent in get(http, "/v1/agents", **params)["data"]]

    said += [{"role": "assistant", "content": ask()}, {"role": "user", "content": "and another"}]
    assert listed() == []
    ask()
    (name,) = listed()

    http.post(f"/v1/agents/{name}/rewind", json={"turn_id": None})
    assert listed() == []
    http.patch(f"/v1/agents/{name}", json={"pin": True})
    assert listed(pin=True) == [name]


# -- generate ---------------------------------------------------------------------------------


def test_only_the_new_message_is_sent_and_the_rest_is_remembered(
    http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="a", system="be brief")

    first, second = say(http, "a", "hello"), say(http, "a", "and more")

    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "and more"},
    ]
    whole = post(http, "/v1/chat/completions", model=running.model, messages=messages, **GREEDY)
    assert second["text"] == whole["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert second["usage"]["cached_tokens"] > 0
    turns = get(http, "/v1/agents/a/turns")["data"]
    assert texts(turns) == ["be brief", "hello", first["text"], "and more", second["text"]]
    assert [turn["id"] for turn in turns] == [second["turn_id"], first["turn_id"]]
    assert [turn["timing"] for turn in turns] == [second["timing"], first["timing"]]
    assert min(first["timing"].values()) > 0
    assert get(http, "/v1/agents/a")["head"] == second["turn_id"]


def test_a_stream_has_the_text_of_the_whole_reply(http: httpx.Client) -> None:
    make(http, id="a")
    make(http, id="b")
    whole = say(http, "a", "hello")

    body = {"message": "hello", **GREEDY, "stream": True}
    answer = http.post("/v1/agents/b/generate", json=body)

    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    assert events[0]["type"] == "started"
    assert "".join(e["text"] for e in events if e["type"] == "text") == whole["text"]
    last = events[-1]
    assert (last["type"], last["text"]) == ("finished", whole["text"])
    assert last["turn_id"] == events[0]["turn_id"] == get(http, "/v1/agents/b")["head"]


def test_messages_may_be_spelled_out(http: httpx.Client) -> None:
    make(http, id="a")
    parts = [{"type": "text", "text": "good "}, {"type": "text", "text": "day"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]

    answer = http.post("/v1/agents/a/generate", json={"messages": messages, **GREEDY})

    assert answer.status_code == 200
    assert texts(get(http, "/v1/agents/a/turns")["data"])[:2] == ["be brief", "good day"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"message": "a", "messages": [{"content": "b"}]},
        {"message": ""},
        {"message": " \n"},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "no call"}]},
        {"messages": [{"role": "assistant", "content": "mine"}]},
        {"message": "a", "temperature": 101},
        {"message": "a", "max_tokens": 0},
        {"message": "a", "max_tokens": -2},
        {"message": "a", "stop": [""]},
        {"message": "half \ud800"},
    ],
)
def test_what_cannot_be_generated_is_refused_before_it_starts(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    make(http, id="a")
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/agents/a/generate", content=json.dumps(body), headers=headers)

    assert answer.status_code == 400, answer.text
    assert get(http, "/v1/agents/a")["turns"] == 0
    assert not get(http, "/v1/agents/a")["busy"]


@pytest.mark.parametrize(
    "body, param",
    [
        ({"message": "x" * 200_000}, "message"),
        ({"messages": [{"content": "x" * 200_000}]}, "messages"),
    ],
    ids=["too long", "one of several too long"],
)
def test_a_refusal_names_the_field_as_it_was_sent(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    make(http, id="a", system="Be brief.")
    answer = http.post("/v1/agents/a/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_agent_of_another_model_is_not_answered(http: httpx.Client) -> None:
    make(http, id="a", model="gpt-9")

    answer = http.post("/v1/agents/a/generate", json={"message": "hello"})

    assert error_of(answer) == (404, "model_not_found")


def test_turns_of_one_agent_run_in_the_order_they_came(
    http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="a")
    has_all = hold(running.server.device)
    with ThreadPoolExecutor(4) as threads:
        asked = []
        for number in range(4):
            asked.append(threads.submit(say, http, "a", f"q{number}"))
            await_that(lambda: running.server.lanes.num_turns("local", "a") == len(asked))
        has_all.set()

    said = texts(get(http, "/v1/agents/a/turns")["data"])
    assert said[::2] == ["q0", "q1", "q2", "q3"]
    assert said[1::2] == [reply.result()["text"] for reply in asked]


def test_a_client_that_leaves_the_queue_takes_its_turn_with_it(
    http: httpx.Client, running: RunningServer
) -> None:
    make(http, id="a")

    def num_turns() -> int:
        return running.server.lanes.num_turns("local", "a")

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=60) as other:
            never = other.post("/v1/agents/a/generate", json={"message": "never"})
            asking = asyncio.create_task(never)
            await asyncio.to_thread(await_that, lambda: num_turns() == 2)
            asking.cancel()

    with going_on(http, "a"):
        asyncio.run(leave())
        await_that(lambda: num_turns() == 1)
    say(http, "a", "q1")

    assert "never" not in texts(get(http, "/v1/agents/a/turns")["data"])


def test_deleting_an_agent_cancels_its_reply(http: httpx.Client) -> None:
    make(http, id="a")
    with going_on(http, "a") as lines:
        assert http.delete("/v1/agents/a").status_code == 204
        events = data_of(lines)

    assert (events[-1]["type"], events[-1]["finish_reason"]) == ("finished", "cancelled")
    assert events[-1]["turn_id"] is None
    assert events[-1]["usage"]["completion_tokens"] < ENDLESS
    assert http.get("/v1/agents/a").status_code == 404


def first_text(lines: Iterator[str]) -> str:
    """Read a reply up to its first text."""
    events = (json.loads(line.removeprefix("data: ")) for line in lines if line)
    return next(str(event["text"]) for event in events if event["type"] == "text")


def test_what_a_client_read_before_it_left_is_a_turn(http: httpx.Client) -> None:
    make(http, id="a")
    with going_on(http, "a") as lines:
        begun = first_text(lines)

    say(http, "a", "hello")  # waits for the stopped one
    later, stopped = get(http, "/v1/agents/a/turns")["data"]
    assert (stopped["finish_reason"], later["finish_reason"]) == ("cancelled", "max_tokens")
    assert texts([later, stopped])[::2] == ["q0", "hello"]
    assert texts([stopped])[1].startswith(begun)
    assert stopped["usage"]["completion_tokens"] < ENDLESS


def test_a_stopped_reply_is_continued_as_if_it_had_not_been_stopped(http: httpx.Client) -> None:
    make(http, id="a")
    with going_on(http, "a") as lines:
        first_text(lines)
    await_that(lambda: get(http, "/v1/agents/a")["turns"] == 1)
    [stopped] = get(http, "/v1/agents/a/turns")["data"]
    post(http, "/v1/agents/a/rewind", turn_id=None)
    asked, begun = ({**each, "content": text} for each, text in begun_of(stopped))
    num_more = 20
    body = {**GREEDY, "max_tokens": num_more}
    post(http, "/v1/agents/a/generate", messages=[asked, begun], **body)

    num_begun = stopped["usage"]["completion_tokens"]
    make(http, id="b")
    whole = say(http, "b", "q0", max_tokens=num_begun + num_more)
    assert texts(get(http, "/v1/agents/a/turns")["data"]) == ["q0", whole["text"]]


def begun_of(turn: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """A turn's messages, to be sent again, with their texts."""
    return list(zip(turn["messages"], texts([turn]), strict=True))


@pytest.mark.parametrize(
    "wanted, form",
    [
        ({"type": "regex", "pattern": r"[A-Z]{2}-\d{3}"}, r"[A-Z]{2}-\d{3}"),
        ({"type": "choice", "choices": ["yes", "no"]}, "yes|no"),
        ({"type": "json", "json_schema": {"type": "boolean"}}, "true|false"),
    ],
)
def test_a_reply_has_the_form_that_is_asked_for(
    http: httpx.Client, wanted: dict[str, Any], form: str
) -> None:
    make(http, id="a")
    reply = post(
        http, "/v1/agents/a/generate", message="hello", temperature=0, response_format=wanted
    )
    assert re.fullmatch(form, reply["text"]), reply


@pytest.mark.parametrize(
    "wanted, words",
    [
        ({"type": "regex"}, "pattern"),
        ({"type": "choice"}, "choices"),
        ({"type": "choice", "choices": []}, "at least 1"),
        ({"type": "regex", "pattern": "("}, "unclosed"),
        ({"type": "json", "pattern": "a"}, "pattern"),
        ({"json_schema": {}}, "json_schema"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_name(
    http: httpx.Client, wanted: dict[str, Any], words: str
) -> None:
    make(http, id="a")
    body = {"message": "hello", "response_format": wanted}
    answer = http.post("/v1/agents/a/generate", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith("response_format")
    assert words in error["message"]


def test_a_conversation_that_outgrows_its_quota_of_bytes_is_refused(
    http: httpx.Client, running: RunningServer
) -> None:
    model = running.server.device.ready_model()
    make(http, id="a")
    say(http, "a", "hello")
    num_tokens = get(http, "/v1/agents/a")["tokens"]
    max_bytes = model.backend.spec.bytes_per_context(num_tokens + 30)
    http.patch("/v1/agents/a", json={"quota": {"max_bytes": max_bytes}})

    say(http, "a", "more", max_tokens=100)  # what goes beyond is not kept
    again = http.post("/v1/agents/a/generate", json={"message": "more"})
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x" * 200}]}
    other = http.post("/v1/chat/completions", headers={"X-Agent-ID": "a"}, json=chat)

    assert error_of(again) == error_of(other) == (429, "quota_exceeded")
    assert other.headers["x-should-retry"] == "false"
    state = get(http, "/v1/agents/a")["state"]
    assert 0 < state["memory_bytes"] <= max_bytes
    http.patch("/v1/agents/a", json={"quota": {}})
    assert say(http, "a", "more")["turn_id"]


def test_a_new_system_prompt_holds_from_the_next_turn_on(http: httpx.Client) -> None:
    make(http, id="a", system="be brief")
    first = say(http, "a", "one")
    http.patch("/v1/agents/a", json={"system": "be long"})

    second = say(http, "a", "two")
    third = say(http, "a", "three")

    latest, changed, oldest = get(http, "/v1/agents/a/turns")["data"]
    said = ["be long", "one", first["text"], "two", second["text"]]
    assert texts([changed]) == said
    assert changed["starts_anew"]
    assert changed["parent"] == oldest["id"] == first["turn_id"]
    assert texts([latest]) == ["three", third["text"]]
    diverged = get(http, "/v1/agents/a/explain")["diverged"]
    assert diverged is None
    assert get(http, "/v1/agents/a")["turns"] == 3


# -- fork and rewind --------------------------------------------------------------------------


def test_a_fork_shares_the_past_and_nothing_after(http: httpx.Client) -> None:
    make(http, id="a", system="s", pin=True)
    first, second = say(http, "a", "one"), say(http, "a", "two")

    forks = post(http, "/v1/agents/a/fork", ids=["b"])["data"]
    early = post(http, "/v1/agents/a/fork", n=3, turn_id=first["turn_id"])

    assert [fork["id"] for fork in forks] == ["b"]
    assert (forks[0]["head"], forks[0]["turns"]) == (second["turn_id"], 2)
    assert not forks[0]["settings"]["pin"]
    assert len({fork["id"] for fork in early["data"]}) == 3
    assert {(fork["head"], fork["turns"]) for fork in early["data"]} == {(first["turn_id"], 1)}
    ours, theirs = say(http, "a", "three"), say(http, "b", "three")
    assert ours["text"] == theirs["text"]
    assert theirs["usage"]["cached_tokens"] == theirs["usage"]["prompt_tokens"] - 1
    branch = say(http, early["data"][0]["id"], "two")
    assert branch["text"] == second["text"]
    assert get(http, "/v1/agents/a")["turns"] == 3


def test_a_fork_under_a_name_that_is_taken_makes_none(http: httpx.Client) -> None:
    make(http, id="a")
    make(http, id="b")

    for ids in (["c", "b"], ["c", "c"]):
        answer = http.post("/v1/agents/a/fork", json={"ids": ids})
        assert error_of(answer) == (409, "conflict")

    assert http.get("/v1/agents/c").status_code == 404
    wrong: list[dict[str, Any]] = [{"ids": ["c"], "n": 2}, {"n": 0}, {"n": 257}, {"ids": []}]
    for body in wrong:
        assert http.post("/v1/agents/a/fork", json=body).status_code == 400


def test_turns_of_others_are_not_there(http: httpx.Client) -> None:
    make(http, id="a")
    make(http, id="b")
    turn_id = say(http, "a", "one")["turn_id"]

    rewound = http.post("/v1/agents/b/rewind", json={"turn_id": turn_id})
    forked = http.post("/v1/agents/b/fork", json={"n": 1, "turn_id": turn_id})
    listed = http.get("/v1/agents/b/turns", params={"before": turn_id})

    assert {error_of(answer) for answer in (rewound, forked, listed)} == {(404, "agent_not_found")}


def test_a_rewind_can_be_undone(http: httpx.Client) -> None:
    make(http, id="a")
    ids = [say(http, "a", text)["turn_id"] for text in ("one", "two", "three")]
    make(http, id="b")
    stranger = say(http, "b", "one")["turn_id"]

    for back in (ids[0], None):
        http.post("/v1/agents/a/rewind", json={"turn_id": back})
        again = post(http, "/v1/agents/a/rewind", turn_id=ids[2])
        assert (again["head"], again["turns"]) == (ids[2], 3)
        assert get(http, "/v1/agents/a")["history"] == ids[::-1]

    for wrong in (stranger, "turn_unknown"):
        answer = http.post("/v1/agents/a/rewind", json={"turn_id": wrong})
        assert error_of(answer) == (404, "agent_not_found")


def test_the_list_names_latest_turns_if_asked(http: httpx.Client) -> None:
    make(http, id="a")
    ids = [say(http, "a", text)["turn_id"] for text in ("one", "two", "three")]
    http.post("/v1/agents/a/fork", json={"ids": ["b"], "turn_id": ids[1]})

    (plain, *_) = get(http, "/v1/agents", sort="id", order="asc")["data"]
    told = get(http, "/v1/agents", sort="id", order="asc", history=2)["data"]

    assert plain["history"] == []
    assert [agent["history"] for agent in told] == [[ids[2], ids[1]], [ids[1], ids[0]]]


def test_an_earlier_turn_is_explained_too(http: httpx.Client) -> None:
    make(http, id="a")
    first, second = say(http, "a", "one"), say(http, "a", "two")

    told = get(http, "/v1/agents/a/explain", turn_id=first["turn_id"])

    assert (told["turn_id"], told["reuse"]) == (first["turn_id"], first["reuse"])
    assert get(http, "/v1/agents/a/explain")["turn_id"] == second["turn_id"]
    answer = http.get("/v1/agents/a/explain", params={"turn_id": "turn_unknown"})
    assert error_of(answer) == (404, "agent_not_found")


def test_a_rewind_ends_the_reply_that_is_running(http: httpx.Client) -> None:
    make(http, id="a")
    first = say(http, "a", "one")
    with going_on(http, "a") as lines:
        post(http, "/v1/agents/a/rewind", turn_id=first["turn_id"])
        events = data_of(lines)

    assert events[-1]["finish_reason"] == "cancelled"
    assert get(http, "/v1/agents/a")["head"] == first["turn_id"]


def test_the_log_is_read_in_pages(http: httpx.Client) -> None:
    make(http, id="a")
    ids = [say(http, "a", f"q{index}")["turn_id"] for index in range(5)]

    found: list[str] = []
    before: str | None = ""
    while before is not None:
        page = get(http, "/v1/agents/a/turns", limit=2, **({"before": before} if before else {}))
        found += [turn["id"] for turn in page["data"]]
        before = page["next"]

    assert found == ids[::-1]


# -- with other protocols ---------------------------------------------------------------------


def test_an_agent_made_by_another_protocol_is_an_agent(
    http: httpx.Client, running: RunningServer
) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    body = {"model": running.model, "messages": messages, **GREEDY}
    chat = http.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": "cli"}).json()
    text = chat["choices"][0]["message"]["content"]

    second = say(http, "cli", "two")

    said = texts(get(http, "/v1/agents/cli/turns")["data"])
    assert said == ["s", "one", text, "two", second["text"]]
    assert second["usage"]["cached_tokens"] > 0
    messages[1]["content"] = "other"
    http.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": "cli"})
    diverged = get(http, "/v1/agents/cli/explain")["diverged"]
    assert diverged["from_turn"] == second["turn_id"]
    assert diverged["before"].endswith("user\no")
    assert diverged["expected"].startswith("one"[1:])
    assert diverged["actual"].startswith("other"[1:])


def test_two_branches_are_compared(http: httpx.Client) -> None:
    make(http, id="a", system="Be brief. " * 40)
    common = [say(http, "a", text)["turn_id"] for text in ("one", "two")]
    post(http, "/v1/agents/a/fork", ids=["b", "same"])
    own = [say(http, "a", "three")["turn_id"], say(http, "a", "four")["turn_id"]]
    other = say(http, "b", "drei")
    found = get(http, "/v1/agents/a/compare", **{"with": "b"})
    assert (found["first_agent"], found["second_agent"]) == ("a", "b")
    assert (found["common_turns"], found["fork"]) == (2, common[1])
    latest = get(http, "/v1/agents/a/turns")["data"]
    assert found["common_tokens"] == latest[2]["tokens"]
    assert [turn["id"] for turn in found["first"]] == own
    assert [turn["id"] for turn in found["second"]] == [other["turn_id"]]
    assert other["reuse"]["computed"] < found["common_tokens"]  # it was computed once

    short = get(http, "/v1/agents/a/compare", **{"with": "b", "limit": 1})
    assert ([turn["id"] for turn in short["first"]], short["first_turns"]) == (own[:1], 2)
    same = get(http, "/v1/agents/same/compare", **{"with": "a"})
    assert (same["common_turns"], same["first"], same["second_turns"]) == (2, [], 2)
    make(http, id="new")
    none = get(http, "/v1/agents/new/compare", **{"with": "b"})
    assert (none["common_turns"], none["common_tokens"], none["fork"]) == (0, 0, None)
    assert len(none["second"]) == 3
    assert http.get("/v1/agents/a/compare", params={"with": "nobody"}).status_code == 404
    assert http.get("/v1/agents/a/compare").status_code == 400
