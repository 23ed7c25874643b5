"""The pages at / and /docs: served whole by this server, with nothing from elsewhere."""

import html
import json
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.entrypoints.cli.launch import CLIENTS
from tests.http_server import RunningServer, give_keys, make_settings, run_server

pytestmark = pytest.mark.integration

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
STATIC = Path(str(files("semantic.adapters.inbound.page"))) / "static"
NAMES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*"))
OURS = [name for name in NAMES if not name.startswith("vendor/")]
CONNECT = Path(__file__).resolve().parents[2] / "docs" / "connect.md"
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def test_a_browser_gets_the_page_under_a_strict_policy(http: httpx.Client) -> None:
    page = http.get("/", headers=BROWSER)

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) > 3
    for path in named:
        assert http.get(f"/{path}").status_code == 200, path
    assert not re.search(r"<(script|style)>|style=|\son\w+=", page.text)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_and_kept_until_it_changes(http: httpx.Client, name: str) -> None:
    answer = http.get(f"/page/{name}")

    assert answer.content == (STATIC / name).read_bytes()
    ending = name.rpartition(".")[2]
    assert answer.headers["content-type"].startswith(TYPES.get(ending, ""))
    again = http.get(f"/page/{name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", OURS)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    text = (STATIC / name).read_text("utf-8")
    places = {place for place in re.findall(r"https?://[\w.-]+", text) if "w3.org" not in place}
    assert places <= ({"https://opencode.ai"} if name == "connect.json" else set())
    for module in re.findall(r'from "([^"]+)"', text) if name.endswith(".js") else ():
        assert (STATIC / module).is_file(), module


def test_licences_are_served_beside_third_party_files() -> None:
    assert {path.name for path in (STATIC / "vendor").glob("LICENSE.*")} == {
        "LICENSE.diff",
        "LICENSE.dompurify",
        "LICENSE.highlight",
        "LICENSE.htm",
        "LICENSE.marked",
        "LICENSE.preact",
        "LICENSE.uplot",
    }


@pytest.mark.parametrize("name", ["nothing.js", "../routes.py", "..%2froutes.py", "", "vendor"])
def test_no_other_file_is_opened(http: httpx.Client, name: str) -> None:
    assert http.get(f"/page/{name}").status_code == 404


def test_the_page_needs_no_key_and_its_requests_do(tmp_path: Path) -> None:
    keys = give_keys(tmp_path, "a")
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        assert http.get("/", headers=BROWSER).status_code == 200
        assert http.get("/page/main.js").status_code == 200
        assert http.get("/v1/agents", headers=BROWSER).status_code == 401
        ours = {"authorization": f"Bearer {keys['a']}"}
        assert http.get("/v1/agents", headers=ours).status_code == 200


def test_client_settings_on_the_page_equal_those_in_the_documents() -> None:
    text = CONNECT.read_text("utf-8")
    values = {"url": "http://127.0.0.1:8000", "model": "smollm2-135m-instruct", "key": "none"}
    values |= {"context": "8192", "output": "2048"}

    clients = json.loads((STATIC / "connect.json").read_text("utf-8"))

    assert {client["launch"] for client in clients if "launch" in client} <= set(CLIENTS)
    for client in clients:
        for step in client["steps"]:
            filled = re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), step["text"])
            assert f"{filled}\n```" in text, client["name"]


# -- /docs ------------------------------------------------------------------------------------


def test_docs_show_every_endpoint_and_load_nothing(
    http: httpx.Client, document: dict[str, Any]
) -> None:
    answer = http.get("/docs")

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert re.findall(r"(?:src|href|action)=(\S+?)>", answer.text) == ["openapi.json"]
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", answer.text)
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<h3>{method.upper()} {path}</h3>" in answer.text
    assert http.get("/redoc").status_code == 404


def commands_of(http: httpx.Client) -> list[list[str]]:
    found = re.findall(r"<pre>(.*?)</pre>", http.get("/docs").text, re.DOTALL)
    return [shlex.split(html.unescape(command)) for command in found]


def test_the_commands_of_docs_work(http: httpx.Client, running: RunningServer) -> None:
    plain = [command for command in commands_of(http) if "{" not in "".join(command[:4])]

    for command in plain:
        method = command[command.index("-X") + 1] if "-X" in command else "GET"
        (url,) = [word for word in command if word.startswith(running.url)]
        body = command[-1].replace("smollm2-135m-instruct", "fake") if "-d" in command else None
        # The fake model ends a summary by chance only.
        if "/v1/events" in url or url.endswith(("/import", "/api/delete", "/compact", "/packs")):
            continue
        headers = {"content-type": "application/json"}
        answer = http.request(method, url, content=body, headers=headers if body else {})
        assert answer.status_code < 300, (command, answer.text)


def test_agents_are_written_to_a_file_and_read_from_it(
    http: httpx.Client, running: RunningServer
) -> None:
    agents = f"{running.url}/v1/agents"
    named = {tuple(command) for command in commands_of(http) if "coder.agent" in command[-1]}

    assert named == {
        ("curl", f"{agents}/{{agent_id}}/export", "-o", "coder.agent"),
        ("curl", "-X", "POST", f"{agents}/import", "--data-binary", "@coder.agent"),
        ("curl", f"{agents}/{{agent_id}}/pack", "-o", "coder.agent"),
        ("curl", "-X", "POST", f"{running.url}/admin/packs", "--data-binary", "@coder.agent"),
    }
    http.post(agents, json={"id": "coder"})
    file = http.get(f"{agents}/coder/export").content
    http.delete(f"{agents}/coder")
    # What curl sends for `--data-binary`.
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post(f"{agents}/import", content=file, headers=headers).status_code == 201
