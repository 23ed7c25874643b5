"""The page at /: served whole by this server, to browsers, with nothing from elsewhere."""

import json
import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from semantic.entrypoints.cli.launch import CLIENTS
from tests.http_server import give_keys, make_settings, run_server

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


def test_licences_stand_beside_what_others_wrote() -> None:
    assert {path.name for path in (STATIC / "vendor").glob("LICENSE.*")} == {
        *("LICENSE.htm", "LICENSE.preact", "LICENSE.uplot"),
    }


@pytest.mark.parametrize("name", ["nothing.js", "../routes.py", "..%2froutes.py", "", "vendor"])
def test_no_other_file_is_opened(http: httpx.Client, name: str) -> None:
    assert http.get(f"/page/{name}").status_code == 404


def test_the_page_needs_no_key_and_what_it_asks_for_does(tmp_path: Path) -> None:
    keys = give_keys(tmp_path, "a")
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        assert http.get("/", headers=BROWSER).status_code == 200
        assert http.get("/page/main.js").status_code == 200
        assert http.get("/").status_code == 401
        assert http.get("/v1/agents", headers=BROWSER).status_code == 401
        ours = {"authorization": f"Bearer {keys['a']}"}
        assert http.get("/v1/agents", headers=ours).status_code == 200


def test_what_clients_are_told_is_what_the_documents_say() -> None:
    text = CONNECT.read_text("utf-8")
    values = {"url": "http://127.0.0.1:8000", "model": "smollm2-135m-instruct", "key": "none"}
    values |= {"context": "8192", "output": "2048"}

    clients = json.loads((STATIC / "connect.json").read_text("utf-8"))

    assert {client["launch"] for client in clients if "launch" in client} <= set(CLIENTS)
    for client in clients:
        for step in client["steps"]:
            filled = re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), step["text"])
            assert f"{filled}\n```" in text, client["name"]
