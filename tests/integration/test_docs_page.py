"""The page at /docs: all that is served, and nothing that is fetched from elsewhere."""

import html
import re
import shlex
from typing import Any

import httpx
import pytest

from tests.http_server import RunningServer

pytestmark = pytest.mark.integration


def test_it_shows_every_endpoint_and_loads_nothing(
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


def test_its_commands_work(http: httpx.Client, running: RunningServer) -> None:
    plain = [command for command in commands_of(http) if "{" not in "".join(command[:4])]

    for command in plain:
        method = command[command.index("-X") + 1] if "-X" in command else "GET"
        (url,) = [word for word in command if word.startswith(running.url)]
        body = command[-1].replace("smollm2-135m-instruct", "fake") if "-d" in command else None
        if "/v1/events" in url or url.endswith("/import"):
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
    }
    http.post(agents, json={"id": "coder"})
    file = http.get(f"{agents}/coder/export").content
    http.delete(f"{agents}/coder")
    # What curl sends for `--data-binary`.
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post(f"{agents}/import", content=file, headers=headers).status_code == 201
