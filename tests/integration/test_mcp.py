"""Agents as tools: the `mcp` package's own client, over HTTP and over standard input and output."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from tests.http_server import RunningServer, give_keys, make_settings, run_server

pytestmark = pytest.mark.integration

LIMITS = {"mcp_max_branches": 4, "mcp_max_depth": 2}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("home")
    with run_server(make_settings(home, **LIMITS)) as running:
        yield running


def overview(running: RunningServer, agent: str) -> dict[str, Any]:
    with running.client() as http:
        return dict(http.get(f"/v1/agents/{agent}").raise_for_status().json())


def agent_with_turns(running: RunningServer, name: str, *messages: str) -> None:
    with running.client() as http:
        http.post("/v1/agents", json={"id": name}).raise_for_status()
        for message in messages:
            body = {"message": message, "max_tokens": 8}
            http.post(f"/v1/agents/{name}/generate", json=body).raise_for_status()


async def use(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return dict(result.structured_content or {})


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)  # type: ignore[union-attr]


async def test_an_agent_tries_two_ways_and_keeps_one(running: RunningServer) -> None:
    await asyncio.to_thread(agent_with_turns, running, "coder", "Write a parser. " * 40, "Go on.")
    before = await asyncio.to_thread(overview, running, "coder")
    async with Client(f"{running.url}/mcp") as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"ask_agent", "fork_agent", "compare_agents", "rewind_agent"} <= names
        listed = await use(client, "list_agents", prefix="coder")
        assert [one["agent"] for one in listed["agents"]] == ["coder"]
        made = await use(client, "fork_agent", agent="coder", names=["fast", "plain"])
        assert made == {"agents": ["fast", "plain"]}
        tried = [
            await use(client, "send_message", agent=name, message=f"Make it {name}.", max_tokens=8)
            for name in ("fast", "plain")
        ]
        assert all(one["reused_tokens"] > 600 for one in tried)  # the conversation so far
        found = await use(client, "compare_agents", first="fast", second="plain")
        assert found["common_turns"] == 2
        assert "Make it fast." in found["fast"][0]["text"]
        assert tried[1]["reply"] in found["plain"][0]["text"]
        assert await use(client, "delete_agent", agent="plain") == {"deleted": "plain"}
        assert "turns_shown" in await use(client, "show_agent", agent="fast")
    after = await asyncio.to_thread(overview, running, "coder")
    assert (after["history"], after["settings"]) == (before["history"], before["settings"])


async def test_a_question_changes_no_agent(running: RunningServer) -> None:
    await asyncio.to_thread(
        agent_with_turns, running, "witness", "I saw a fox. " * 40, "And a hen."
    )
    before = await asyncio.to_thread(overview, running, "witness")
    async with Client(f"{running.url}/mcp") as client:
        ask = {"agent": "witness", "question": "What did you see?", "max_tokens": 8}
        now = await use(client, "ask_agent", **ask)
        again = await use(client, "ask_agent", **ask)
        assert now["reused_tokens"] > 500
        assert now["prompt_tokens"] == again["prompt_tokens"]  # no trace of the first question
        first = before["history"][-1]
        earlier = await use(client, "ask_agent", **ask, turn_id=first)
        assert earlier["prompt_tokens"] < now["prompt_tokens"]
        rewound = await use(client, "rewind_agent", agent="witness", turn_id=first)
        assert rewound == {"agent": "witness", "turns": 1, "turn_id": first}
        await use(client, "rewind_agent", agent="witness", turn_id=before["head"])
        assert "reused" in (await use(client, "explain_agent", agent="witness"))["summary"]
        assert (await use(client, "pin_agent", agent="witness"))["is_pinned"]
        await use(client, "pin_agent", agent="witness", is_pinned=False)
        exported = await use(client, "export_agent", agent="witness")
    after = await asyncio.to_thread(overview, running, "witness")
    assert (after["head"], after["turns"]) == (before["head"], before["turns"])
    with running.client() as http:
        assert http.get(exported["path"]).is_success
        assert http.get("/v1/agents", params={"prefix": "witness-ask"}).json()["data"] == []


async def test_a_model_compacts_an_agent_into_a_branch(running: RunningServer) -> None:
    await asyncio.to_thread(agent_with_turns, running, "long", "I saw a fox. " * 40, "Go on.")
    before = await asyncio.to_thread(overview, running, "long")
    async with Client(f"{running.url}/mcp") as client:
        ask = {"agent": "long", "keep_turns": 1, "max_tokens": 32_768}
        made = await use(client, "compact_agent", name="brief", **ask)
        assert (made["agent"], made["tokens_before"]) == ("brief", before["tokens"])
        assert made["reused_tokens"] > 400
        assert "too short" in await refused(client, "compact_agent", agent="long", keep_turns=9)
        assert "agent id" in await refused(client, "compact_agent", name="a b", **ask)
    branch = await asyncio.to_thread(overview, running, "brief")
    assert branch["settings"]["labels"]["branch.root"] == "long"
    after = await asyncio.to_thread(overview, running, "long")
    assert (after["head"], after["turns"]) == (before["head"], before["turns"])


async def test_a_model_cannot_fork_without_end(running: RunningServer) -> None:
    await asyncio.to_thread(agent_with_turns, running, "seed", "Hello.")
    async with Client(f"{running.url}/mcp") as client:
        await use(client, "fork_agent", agent="seed", names=["s1"])
        await use(client, "fork_agent", agent="s1", names=["s2"])
        assert "mcp_max_depth is 2" in await refused(client, "fork_agent", agent="s2", count=1)
        assert "mcp_max_branches (4)" in await refused(client, "fork_agent", agent="seed", count=3)
        assert "s1" in await refused(client, "fork_agent", agent="seed", names=["s1"])
        assert "no tool 'sudo'" in await refused(client, "sudo")
        assert "agent: Field required" in await refused(client, "show_agent")
        assert "nobody" in await refused(client, "show_agent", agent="nobody")


async def test_a_key_reaches_only_its_tenants_agents(tmp_path: Path) -> None:
    secrets = give_keys(tmp_path, "a", "b")
    with run_server(make_settings(tmp_path)) as running:
        url = f"{running.url}/mcp"
        assert (await asyncio.to_thread(httpx.post, url, json={})).status_code == 401
        for tenant, expected in (("a", ["mine"]), ("b", [])):
            headers = {"authorization": f"Bearer {secrets[tenant]}"}
            with running.client(headers=headers) as http:
                if expected:
                    http.post("/v1/agents", json={"id": "mine"}).raise_for_status()
            async with create_mcp_http_client(headers=headers) as http_client:
                transport = streamable_http_client(url, http_client=http_client)
                async with Client(transport) as client:
                    found = await use(client, "list_agents")
            assert [one["agent"] for one in found["agents"]] == expected


async def test_a_program_bridges_standard_input_and_output(running: RunningServer) -> None:
    await asyncio.to_thread(agent_with_turns, running, "piped", "Hello.")
    program = StdioServerParameters(
        command=sys.executable,
        args=["-m", "semantic", "mcp", "--server", running.url],
        env={**os.environ, "HOME": "/nonexistent"},
    )
    async with Client(stdio_client(program)) as client:
        found = await use(client, "list_agents", prefix="piped")
        assert [one["agent"] for one in found["agents"]] == ["piped"]
        assert json.dumps(found)


def test_a_missing_package_is_named(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with running.client() as http:
        refused = http.post("/mcp", json={})
    assert refused.status_code == 501
    assert "semantic-server[mcp]" in refused.json()["error"]["message"]
