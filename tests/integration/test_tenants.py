"""Two tenants of one server share nothing, and cannot detect each other."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from semantic.adapters.config.keys import KeyFile, RateEntry, TenantEntry, edit_key_file
from semantic.domain.agents import Principal
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.bootstrap import bootstrap
from tests.http_server import RunningServer, give_keys, make_settings, run_server

pytestmark = pytest.mark.integration

LONG = "All work and no play makes an agent dull. " * 30
SAID = [{"role": "user", "content": LONG}]
CHAT = {"model": "fake", "max_tokens": 4, "temperature": 0, "messages": SAID}
ASK = {"model": "fake", "max_output_tokens": 4, "input": LONG, "temperature": 0}


class House:
    """A server with keys, and a client for each tenant."""

    def __init__(
        self, running: RunningServer, secrets: dict[str, str], stack: contextlib.ExitStack
    ) -> None:
        self.running = running
        self.secrets = secrets
        self.nobody = stack.enter_context(running.client())
        self.a, self.b, self.admin = (
            stack.enter_context(running.client(headers={"x-api-key": secrets[name]}))
            for name in ("a", "b", "admin")
        )


@contextlib.contextmanager
def open_house(home: Path, limits: TenantEntry | None = None) -> Iterator[House]:
    secrets = give_keys(home, "a", "b", "admin", limits=limits)
    with run_server(make_settings(home)) as running, contextlib.ExitStack() as stack:
        yield House(running, secrets, stack)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("home")) as house:
        yield house


# -- keys -----------------------------------------------------------------------------------------

PATHS = [
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", "/v1/agents"),
    ("GET", "/v1/events"),
    ("GET", "/v1/responses/x"),
    ("GET", "/api/tags"),
    ("POST", "/api/chat"),
    ("POST", "/mcp"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/chat/completions"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/agents"),
    ("POST", "/v1/agents/import"),
    ("POST", "/v1/cache/gc"),
    ("GET", "/v1/cache"),
    ("GET", "/cache"),
    ("GET", "/metrics"),
    ("GET", "/admin"),
    ("GET", "/nowhere"),
    ("HEAD", "/v1/models"),
]


@pytest.mark.parametrize("method,path", PATHS)
def test_without_a_key_nothing_is_answered(house: House, method: str, path: str) -> None:
    bodies = set()
    for headers in (
        {},
        {"x-api-key": "none"},
        {"authorization": f"Basic {house.secrets['a']}"},
        {"authorization": "Bearer"},
        {"x-api-key": house.secrets["a"][:-1]},
        {"cookie": f"x-api-key={house.secrets['a']}"},
    ):
        answer = house.nobody.request(method, path, headers=headers)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        bodies.add(json.dumps({**answer.json(), "request_id": ""}) if answer.content else "")
    assert len(bodies) == 1
    answer = house.nobody.request(method, f"{path}?api_key={house.secrets['a']}")
    assert answer.status_code == 401


def test_clients_that_look_for_a_server_learn_only_that_there_is_one(house: House) -> None:
    assert house.nobody.get("/").text == "Ollama is running"


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/health/startup"])
def test_probes_need_no_key(house: House, path: str) -> None:
    assert house.nobody.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/healthy", "/health/../v1/models", "//health/live", "/Health"])
def test_paths_like_a_probes_need_one(house: House, path: str) -> None:
    url = httpx.URL(house.running.url).copy_with(raw_path=path.encode())
    assert house.nobody.get(url).status_code == 401


def test_errors_have_the_shape_of_the_clients_vendor(house: House) -> None:
    openai = house.nobody.post("/v1/chat/completions", json=CHAT).json()
    assert openai["error"]["code"] == "invalid_api_key"
    anthropic = house.nobody.post("/v1/messages", json=CHAT).json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "{a}"},
        {"authorization": "Bearer {a}"},
        {"authorization": "bearer  {a}"},
        {"x-api-key": "none", "authorization": "Bearer {a}"},
        {"x-api-key": "{a}", "authorization": "Bearer none"},
    ],
)
def test_a_key_is_taken_from_either_header(house: House, headers: dict[str, str]) -> None:
    sent = {name: value.format(a=house.secrets["a"]) for name, value in headers.items()}
    assert house.nobody.get("/v1/models", headers=sent).status_code == 200


@pytest.mark.parametrize(
    "method,path",
    [
        ("GET", "/v1/cache"),
        ("GET", "/cache"),
        ("POST", "/v1/cache/gc"),
        ("POST", "/v1/cache/verify"),
        ("GET", "/metrics"),
        ("GET", "/admin/models"),
    ],
)
def test_what_concerns_all_needs_an_admins_key(house: House, method: str, path: str) -> None:
    assert house.nobody.request(method, path).status_code == 401
    answer = house.a.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_required")
    assert house.admin.request(method, path).status_code not in (401, 403)


def test_a_large_body_without_a_key_is_answered(house: House) -> None:
    answer = house.nobody.post("/v1/chat/completions", content=b"x" * 500_000)
    assert answer.status_code == 401


# -- what tenants share: nothing ------------------------------------------------------------------


def _chat(http: httpx.Client) -> tuple[int, str]:
    body = http.post("/v1/chat/completions", json=CHAT).json()
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, body["choices"][0]["message"]["content"]


def _completion(http: httpx.Client) -> tuple[int, str]:
    asked = {"model": "fake", "max_tokens": 4, "temperature": 0, "prompt": LONG}
    body = http.post("/v1/completions", json=asked).json()
    return body["usage"]["prompt_tokens_details"]["cached_tokens"], body["choices"][0]["text"]


def _response(http: httpx.Client) -> tuple[int, str]:
    body = http.post("/v1/responses", json=ASK).json()
    cached = body["usage"]["input_tokens_details"]["cached_tokens"]
    return cached, body["output"][-1]["content"][0]["text"]


def _message(http: httpx.Client) -> tuple[int, str]:
    body = http.post("/v1/messages", json=CHAT).json()
    return body["usage"]["cache_read_input_tokens"], body["content"][0]["text"]


def _generate(http: httpx.Client) -> tuple[int, str]:
    agent = http.post("/v1/agents", json={}).json()["id"]
    asked = {"message": LONG, "max_tokens": 4, "temperature": 0}
    body = http.post(f"/v1/agents/{agent}/generate", json=asked).json()
    return body["usage"]["cached_tokens"], str(body["message"])


@pytest.mark.parametrize("protocol", [_chat, _completion, _response, _message, _generate])
def test_an_identical_prompt_is_cold_for_the_other_tenant(tmp_path: Path, protocol: Any) -> None:
    with open_house(tmp_path) as house:
        cold, text = protocol(house.a)
        warm, again = protocol(house.a)
        other, same = protocol(house.b)
    assert cold == other == 0
    assert warm > 0
    assert text == again == same


def _known_to_a(house: House) -> dict[str, str]:
    """An agent, a turn and a response of tenant a."""
    agent = house.a.post("/v1/agents", json={"id": "secret-plans"})
    assert agent.status_code in (200, 201)
    said = {"message": "hi", "max_tokens": 2}
    turn = house.a.post("/v1/agents/secret-plans/generate", json=said).json()
    response = house.a.post("/v1/responses", json=ASK).json()
    return {"agent": "secret-plans", "turn": turn["turn_id"], "response": response["id"]}


AGENT_REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/agents/{agent}", None),
    ("PATCH", "/v1/agents/{agent}", {"pin": True}),
    ("DELETE", "/v1/agents/{agent}", None),
    ("GET", "/v1/agents/{agent}/turns", None),
    ("GET", "/v1/agents/{agent}/explain", None),
    ("GET", "/v1/agents/{agent}/export", None),
    ("POST", "/v1/agents/{agent}/fork", {"ids": ["mine"]}),
    ("POST", "/v1/agents/forker/fork", {"ids": ["mine"], "turn_id": "{turn}"}),
    ("POST", "/v1/agents/{agent}/rewind", {"turn_id": None}),
    ("POST", "/v1/agents/{agent}/cancel", None),
    ("POST", "/v1/agents/{agent}/prefetch", None),
    ("POST", "/v1/agents/{agent}/evict", {"to": "cold"}),
    ("POST", "/v1/agents/{agent}/generate", {"message": "hi", "max_tokens": 2}),
    ("GET", "/v1/responses/{response}", None),
    ("GET", "/v1/responses/{response}?stream=true", None),
    ("DELETE", "/v1/responses/{response}", None),
    ("POST", "/v1/responses/{response}/cancel", None),
    ("POST", "/v1/responses", {**ASK, "previous_response_id": "{response}"}),
]


@pytest.mark.parametrize("method,path,body", AGENT_REQUESTS)
def test_a_foreign_id_is_answered_as_one_that_does_not_exist(
    house: House, method: str, path: str, body: Any
) -> None:
    known = _known_to_a(house)
    house.b.post("/v1/agents", json={"id": "forker"})
    unknown = {name: f"{value[:-3]}xyz" for name, value in known.items()}

    def ask(ids: dict[str, str]) -> tuple[int, str]:
        url = path
        sent = json.dumps(body) if body is not None else None
        for name, value in ids.items():
            url = url.replace(f"{{{name}}}", value)
            sent = sent and sent.replace(f"{{{name}}}", value)
        headers = {"content-type": "application/json"}
        answer = house.b.request(method, url, content=sent, headers=headers)
        text = answer.text
        for name, value in ids.items():
            text = text.replace(value, name)
        return answer.status_code, text

    foreign, missing = ask(known), ask(unknown)
    assert foreign == missing
    assert foreign[0] == (400 if path == "/v1/responses" else 404)
    # It is still there, and its owner's.
    assert house.a.get("/v1/agents/secret-plans").status_code == 200
    assert house.a.get(f"/v1/responses/{known['response']}").status_code == 200


def test_lists_show_ones_own(house: House) -> None:
    _known_to_a(house)
    house.b.post("/v1/agents", json={"id": "b-only"})
    names = [agent["id"] for agent in house.b.get("/v1/agents").json()["data"]]
    assert "b-only" in names
    assert "secret-plans" not in names


def test_both_may_use_the_same_name_for_their_own(house: House) -> None:
    for http in (house.a, house.b):
        assert http.post("/v1/agents", json={"id": "coder"}).status_code == 201
    assert house.a.delete("/v1/agents/coder").status_code == 204
    assert house.b.get("/v1/agents/coder").status_code == 200


def test_events_tell_of_ones_own_agents_only(house: House) -> None:
    with house.b.stream("GET", "/v1/events") as feed:
        lines = (line for line in feed.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines)[6:])
        house.a.post("/v1/agents", json={"id": "unseen"})
        _chat(house.a)
        house.b.post("/v1/agents", json={"id": "seen"})
        event = json.loads(next(lines)[6:])
        assert event == {"type": "agent.created", "agent_id": "seen"}
    # Nor do figures of all blocks tell what another does.
    assert first["pressure"] == "none"


def test_an_exported_agent_does_not_bring_the_other_tenants_state(house: House) -> None:
    _known_to_a(house)
    file = house.a.get("/v1/agents/secret-plans/export").content
    taken = house.b.post("/v1/agents/import?id=gift", content=file)
    assert taken.status_code == 201
    assert house.a.get("/v1/agents/gift").status_code == 404


def test_a_new_key_finds_what_the_old_one_left(tmp_path: Path) -> None:
    secrets = give_keys(tmp_path, "a")
    with run_server(make_settings(tmp_path)) as running:
        old = running.client(headers={"x-api-key": secrets["a"]})
        assert _chat(old)[0] == 0
        key = running.server.access.ring.find_key(secrets["a"])
        assert key is not None
        renewed = give_keys(tmp_path, "a")
        edit_key_file(tmp_path / "keys.json", lambda file: file.without_key(key.id))
        running.server.access.reload()
        assert old.get("/v1/models").status_code == 401
        with running.client(headers={"x-api-key": renewed["a"]}) as new:
            assert _chat(new)[0] > 0
        old.close()


def test_a_lost_key_file_never_opens_a_server(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        (tmp_path / "keys.json").unlink()
        with pytest.raises(InvalidRequestError, match="is missing"):
            house.running.server.access.reload()
        assert house.nobody.get("/v1/agents").status_code == 401
        assert house.a.get("/v1/agents").status_code == 200
    with pytest.raises(InvalidRequestError, match="semantic keys add"):
        bootstrap(make_settings(tmp_path))
    secret = give_keys(tmp_path, "a")["a"]
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        assert http.get("/v1/agents").status_code == 401
        assert http.get("/v1/agents", headers={"x-api-key": secret}).status_code == 200


def test_details_of_a_problem_are_for_the_admin(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        memory: Any = house.running.server.memory
        memory._loss = "the turns of agent secret-plans are lost"
        memory._formats = SimpleNamespace(summary=lambda _: "7 MB of it cannot be used.")
        told, known = (http.get("/health").json() for http in (house.nobody, house.admin))
    assert told["problem"]
    assert "secret-plans" not in told["problem"]
    assert "secret-plans" in known["problem"]
    assert (told["note"], known["note"]) == ("", "7 MB of it cannot be used.")


# -- limits ---------------------------------------------------------------------------------------

HEADERS = (
    "x-ratelimit-limit-{}",
    "x-ratelimit-remaining-{}",
    "x-ratelimit-reset-{}",
    *(f"anthropic-ratelimit-{{}}-{what}" for what in ("limit", "remaining", "reset")),
)
SHORT = {**CHAT, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "limits,kind",
    [
        ({"key": {"requests_per_minute": 1}}, "requests"),
        ({"agent": {"tokens_per_minute": 20}}, "tokens"),
    ],
    ids=["key requests", "agent tokens"],
)
def test_a_rate_limit_error_says_when_to_retry(
    tmp_path: Path, limits: dict[str, Any], kind: str
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", SHORT),
        ("/v1/completions", {"model": "fake", "max_tokens": 4, "prompt": "hi"}),
        ("/v1/responses", {"model": "fake", "max_output_tokens": 4, "input": "hi"}),
        ("/v1/messages", SHORT),
        ("/v1/agents/coder/generate", {"message": "hi", "max_tokens": 4}),
        ("/v1/chat/completions", {**SHORT, "stream": True}),
    ]
    with open_house(tmp_path, TenantEntry.model_validate(limits)) as house:
        named = {"x-agent-id": "coder"}
        house.a.post("/v1/agents", json={"id": "coder"})
        house.b.post("/v1/agents", json={"id": "coder"})
        for _ in range(20):
            answer = house.a.post("/v1/chat/completions", json=SHORT, headers=named)
            if answer.status_code != 200:
                break
        for path, body in asked:
            answer = house.a.post(path, json=body, headers=named)
            assert answer.status_code == 429, path
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert "/minute exceeded" in answer.json()["error"]["message"]
            told = [answer.headers[name.format(kind)] for name in HEADERS]
            limit = "1" if kind == "requests" else "20"
            assert (told[0], told[1], told[3], told[4]) == (limit, "0", limit, "0")
            assert told[2].endswith("s")
            assert told[5].endswith("Z")
        other = house.b.post("/v1/chat/completions", json=SHORT, headers=named)
        assert other.status_code == 200


def test_answers_within_the_limits_report_the_remaining_quota(tmp_path: Path) -> None:
    rates = {"requests_per_minute": 5, "tokens_per_minute": 5000}
    with open_house(tmp_path, TenantEntry.model_validate({"key": rates})) as house:
        first, second = (house.a.post("/v1/messages", json=CHAT) for _ in range(2))
    assert first.headers["anthropic-ratelimit-requests-remaining"] == "4"
    assert second.headers["x-ratelimit-remaining-requests"] == "3"
    assert int(second.headers["x-ratelimit-remaining-tokens"]) < 5000


def test_the_total_limit_counts_every_tenant(tmp_path: Path) -> None:
    limits = RateEntry(requests_per_minute=3)
    edit_key_file(tmp_path / "keys.json", lambda file: file.model_copy(update={"limits": limits}))
    with open_house(tmp_path) as house:
        clients = (house.a, house.b, house.a, house.b)
        statuses = [http.post("/v1/messages", json=SHORT).status_code for http in clients]
    assert statuses == [200, 200, 200, 429]


def test_one_reply_at_a_time(tmp_path: Path) -> None:
    with open_house(tmp_path, TenantEntry(max_concurrent=1)) as house:
        assert house.a.post("/v1/messages", json=SHORT).status_code == 200
        limits = house.running.server.inference.limits()
        assert limits is not None
        running_reply = limits.admit(Principal("a"))
        refused = house.a.post("/v1/messages", json=SHORT)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert house.b.post("/v1/messages", json=SHORT).status_code == 200
        running_reply.release()
        assert house.a.post("/v1/messages", json=SHORT).status_code == 200


def test_the_disk_quota_counts_agents_and_turns(tmp_path: Path) -> None:
    with open_house(tmp_path, TenantEntry(disk_quota_mb=3)) as house:
        statuses = [
            house.a.post("/v1/agents", json={"id": f"a{n}", "system": "x" * 2**20}).status_code
            for n in range(5)
        ]
        assert statuses == [201, 201, 429, 429, 429]
        again = house.a.post("/v1/agents", json={"id": "a0", "system": "x" * 2**20})
        assert again.status_code == 200
        exported = house.a.get("/v1/agents/a0/export").content
        assert house.a.post("/v1/agents/import?id=b", content=exported).status_code == 429
        forks = house.a.post("/v1/agents/a0/fork", json={"n": 1})
        change = house.a.patch("/v1/agents/a0", json={"system": "x" * 2**21})
        assert (forks.status_code, change.status_code) == (429, 429)
        paths = house.a.get("/openapi.json").json()["paths"]
        for path, method in (("", "post"), ("/{agent_id}", "patch"), ("/{agent_id}/fork", "post")):
            assert "429" in paths[f"/v1/agents{path}"][method]["responses"]
        assert house.a.post("/v1/messages", json=CHAT).status_code == 200

        def shrink(file: KeyFile) -> KeyFile:
            limits = {**file.tenants, "a": TenantEntry(disk_quota_mb=1)}
            return file.model_copy(update={"tenants": limits})

        edit_key_file(tmp_path / "keys.json", shrink)
        house.running.server.access.reload()
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", SHORT),
            ("/v1/messages", SHORT),
            ("/v1/responses", {"model": "fake", "input": "hi"}),
            ("/v1/agents/a0/generate", {"message": "hi"}),
        ]
        for path, body in asked:
            answer = house.a.post(path, json=body)
            assert answer.status_code == 429, path
            assert "disk_quota_mb" in answer.json()["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"
            assert house.b.post(path.replace("a0", "none"), json=body).status_code in (200, 404)
        for name in ("a0", "a1"):
            assert house.a.delete(f"/v1/agents/{name}").status_code < 300
        assert house.a.post("/v1/messages", json=SHORT).status_code == 200


# -- without keys ---------------------------------------------------------------------------------


def test_other_machines_are_let_in_with_keys_only(tmp_path: Path) -> None:
    remote = {"host": "0.0.0.0", "allow_remote": True}  # noqa: S104
    with pytest.raises(InvalidRequestError, match="semantic keys add --tenant NAME"):
        bootstrap(make_settings(tmp_path, **remote))
    give_keys(tmp_path, "admin")
    server = bootstrap(make_settings(tmp_path, **remote))
    assert server.memory.close(5)
