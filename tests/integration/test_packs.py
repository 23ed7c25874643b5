"""Cache packs over a socket: what a file has, what it saves, and which files are refused."""

import contextlib
import gzip
import io
import json
import re
import shutil
import socket
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from semantic.adapters.outbound.blocks.format import KVCodec
from semantic.adapters.outbound.blocks.pack_archive import PackFile
from semantic.domain.blocks import unpack_tokens
from semantic.entrypoints.cli.app import main
from semantic.ports.packs import PackItem
from semantic.ports.storage import ExportPart
from tests.agent_files import changed, members, with_member_fields
from tests.http_server import RunningServer, give_keys, make_settings, run_server
from tests.pack_files import (
    Change,
    forged,
    keys_of,
    with_altered_block,
    with_head,
    with_tokens,
    without_block,
)

pytestmark = pytest.mark.integration

SYSTEM = "You are a coding agent. Follow the rules of the project. " * 12
TOOLS = [
    {
        "name": name,
        "description": f"Use {name} to work on a file of the project, and say why.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    for name in ("Read", "Edit", "Bash", "Grep")
]
PRIVATE = "my secret plan is zxqvj"


def ask(http: httpx.Client, text: str, agent: str = "", **more: Any) -> dict[str, Any]:
    """One request of a coding agent, as it sends it; returns the reply."""
    body = {
        "model": "claude-x",
        "max_tokens": 12,
        "temperature": 0,
        "system": [{"type": "text", "text": SYSTEM}],
        "tools": TOOLS,
        "messages": [{"role": "user", "content": text}],
        **more,
    }
    headers = {"x-agent-id": agent} if agent else {}
    answer = http.post("/v1/messages", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def said(reply: dict[str, Any]) -> Any:
    """What a reply says, without ids."""
    content = [{k: v for k, v in part.items() if k != "id"} for part in reply["content"]]
    return content, reply["stop_reason"], reply["usage"]["output_tokens"]


def reused(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["cache_read_input_tokens"])


def make_pack(http: httpx.Client, agent: str = "coder", **more: Any) -> bytes:
    """A pack of an agent that has said something."""
    ask(http, PRIVATE, agent, **more)
    ask(http, f"{PRIVATE} again", agent, **more)
    answer = http.get(f"/v1/agents/{agent}/pack", params={"name": "claude-code"})
    assert answer.status_code == 200, answer.text
    return answer.content


def add(http: httpx.Client, content: bytes, **query: Any) -> httpx.Response:
    return http.post("/admin/packs", params=query, content=content)


def trust(ours: Path, theirs: Path) -> None:
    keys_of(ours).trust("alice", keys_of(theirs).public)


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of the server that made `pack`."""
    return tmp_path_factory.mktemp("maker")


@pytest.fixture(scope="module")
def making(maker: Path) -> Iterator[httpx.Client]:
    """A client of the server that makes packs."""
    with run_server(make_settings(maker)) as server, server.client() as http:
        yield http


@pytest.fixture(scope="module")
def pack(making: httpx.Client) -> bytes:
    return make_pack(making)


@pytest.fixture(scope="module")
def running(maker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that trusts the maker, and to which every test adds in vain."""
    home = tmp_path_factory.mktemp("ours")
    keys_of(home).trust("alice", keys_of(maker).public)
    with run_server(make_settings(home)) as server:
        yield server


def blocks(running: RunningServer) -> int:
    return len(running.server.memory.cache.store.nodes())


# -- what a pack has ----------------------------------------------------------------------------


def parts_of(content: bytes) -> list[ExportPart]:
    file = PackFile(KVCodec(), keys_of(Path("nowhere")))
    return [i for i in file.read([content], has_parts=True) if isinstance(i, ExportPart)]


def text_of(content: bytes) -> str:
    """The text of all tokens of a pack of the fake model, whose tokens are bytes."""
    ids = [token for item in parts_of(content) for token in unpack_tokens(item.part.tokens)]
    return bytes(token for token in ids if token < 256).decode()


@pytest.mark.parametrize("num_more", [0, 1, 37, 150, 255])
def test_a_file_ends_before_the_first_user_message(making: httpx.Client, num_more: int) -> None:
    """For heads of any length, also one that ends where a block is full."""
    system = SYSTEM + "x" * num_more
    agent = f"head-{num_more}"
    content = make_pack(making, agent, system=[{"type": "text", "text": system}])
    turns = making.get(f"/v1/agents/{agent}/turns").json()["data"]
    text, head = text_of(content), json.loads(members(content)[0][1])
    assert system[:500] in text
    for word in ("zxqvj", PRIVATE, agent, *(turn["id"] for turn in turns)):
        assert word not in text
        assert word not in head["text"]
        assert word.encode() not in content
    names = {name.split("/")[0] for name, _ in members(content)}
    assert names == {"pack.json", "blocks", "manifest.json"}
    assert head["num_tokens"] == sum(item.part.num_tokens for item in parts_of(content))


def test_all_of_the_head_is_in_the_file(making: httpx.Client) -> None:
    """Blocks end where the head ends, so nothing of it is lost to whole blocks."""
    ends = []
    for length in range(600, 606):
        system = [{"type": "text", "text": "y" * length}]
        content = make_pack(making, f"whole-{length}", system=system, tools=[])
        ends.append(json.loads(members(content)[0][1])["num_tokens"])
    assert ends == list(range(ends[0], ends[0] + 6))
    assert ends[0] > 600


def test_an_agent_without_a_head_makes_no_pack(making: httpx.Client) -> None:
    bare = {"model": "claude-x", "prompt": "hi", "max_tokens": 2}
    headers = {"x-agent-id": "bare"}
    making.post("/v1/completions", json=bare, headers=headers).raise_for_status()
    answer = making.get("/v1/agents/bare/pack", params={"name": "p"})
    assert answer.status_code == 400
    assert "no system prompt and no tools" in answer.json()["error"]["message"]
    assert making.get("/v1/agents/nobody/pack", params={"name": "p"}).status_code == 404
    assert making.get("/v1/agents/bare/pack", params={"name": "../p"}).status_code == 400


# -- what a pack saves --------------------------------------------------------------------------


def windowed_model(starter_model_dir: Path, directory: Path) -> Path:
    """A tiny model whose layers attend to a window and to everything in turn."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    source = json.loads((starter_model_dir / "config.json").read_text())
    config = Gemma2Config(
        vocab_size=source["vocab_size"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=64,
        max_position_embeddings=2048,
        eos_token_id=source["eos_token_id"],
    )
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(directory)
    for file in starter_model_dir.glob("*token*"):
        shutil.copy(file, directory)
    return directory


@pytest.fixture(params=["fake", "torch", "window"])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    if request.param == "fake":
        return {}
    if request.param == "window":
        starter = request.getfixturevalue("starter_model_dir")
        directory = windowed_model(starter, tmp_path_factory.mktemp("model") / "windowed")
    else:
        directory = request.getfixturevalue("tiny_starter_dir")
    return {"backend": "torch", "model": str(directory), "dtype": "float32", "threads": 1}


def test_a_first_turn_with_a_pack_equals_one_without(
    backend: dict[str, Any], tmp_path: Path
) -> None:
    theirs = make_settings(tmp_path / "theirs", **backend)
    with run_server(theirs) as running, running.client() as http:
        expected = ask(http, "What is in main.py?", "first")
        assert reused(expected) == 0
        content = make_pack(http)

    trust(tmp_path / "ours", tmp_path / "theirs")
    ours = make_settings(tmp_path / "ours", **backend)
    with run_server(ours) as running, running.client() as http:
        answer = add(http, content, sample=1)
        assert answer.status_code == 201, answer.text
        (found,) = answer.json()["data"]
        assert answer.json()["checked_blocks"] == found["blocks"] > 1
        assert found["usable"]
        assert found["disk_tokens"] == found["tokens"]
        reply = ask(http, "What is in main.py?", "first")
        assert reused(reply) >= found["tokens"]
        assert said(reply) == said(expected)
        running.server.memory.cache.store.check_integrity()


def test_a_pack_outlives_restarts_and_agents_until_it_is_removed(
    maker: Path, pack: bytes, tmp_path: Path
) -> None:
    trust(tmp_path, maker)
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        (found,) = add(http, pack).json()["data"]
        expected = ask(http, "hi", "first")
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        http.delete("/v1/agents/first")
        http.post("/v1/cache/gc", json={"orphan_age_s": 0})
        (kept,) = http.get("/admin/packs").json()["data"]
        assert kept["disk_tokens"] == found["tokens"]
        reply = ask(http, "hi", "second")
        assert reused(reply) >= found["tokens"]
        assert said(reply) == said(expected)
        assert http.delete("/admin/packs/claude-code").status_code == 204
        assert http.delete("/admin/packs/claude-code").status_code == 404
        assert http.get("/admin/packs").json()["data"] == []
        # What a conversation is built on stays with the conversation.
        assert reused(ask(http, "ho", "third")) >= found["tokens"]
        for agent in ("second", "third"):
            http.delete(f"/v1/agents/{agent}")
        http.post("/v1/cache/gc", json={"orphan_age_s": 0})
        assert blocks(running) == 0


def test_running_requests_go_on_beside_a_check(maker: Path, pack: bytes, tmp_path: Path) -> None:
    trust(tmp_path, maker)
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        body = {"max_tokens": 300, "messages": [{"role": "user", "content": "go on"}]}
        more = {"model": "claude-x", "temperature": 0, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/messages", json=body | more) as streaming:
            lines = streaming.iter_lines()
            next(lines)
            with running.client() as other:
                assert add(other, pack, sample=1).status_code == 201
            assert any("message_stop" in line for line in lines)
        running.server.memory.cache.store.check_integrity()


# -- who shares a pack --------------------------------------------------------------------------


def test_a_pack_is_shared_by_the_tenants_that_it_was_added_for(
    maker: Path, pack: bytes, tmp_path: Path
) -> None:
    secrets = give_keys(tmp_path, "a", "b", "c", "admin")
    trust(tmp_path, maker)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(run_server(make_settings(tmp_path)))
        a, b, c, admin = (
            stack.enter_context(running.client(headers={"x-api-key": secrets[name]}))
            for name in ("a", "b", "c", "admin")
        )
        for client in (a, b, c):  # a tenant exists from its first request on
            client.get("/v1/agents")
        assert add(a, pack).status_code == 403
        unknown = add(admin, pack, tenant=["a", "nobody"])
        assert unknown.status_code == 400
        assert "no tenant 'nobody'" in unknown.json()["error"]["message"]
        assert admin.get("/admin/packs").json()["data"] == []
        assert add(admin, pack, tenant=["a", "b"]).status_code == 201
        packs = admin.get("/admin/packs").json()["data"]
        assert [found["tenant"] for found in packs] == ["a", "b"]
        num_tokens = packs[0]["tokens"]
        assert [reused(ask(client, "hi")) >= num_tokens for client in (a, b)] == [True, True]
        assert reused(ask(c, "hi")) == 0

        # No client can name, list, change or delete it as an agent.
        named = "pack:claude-code"
        assert a.get("/v1/agents").json()["data"] == []
        for method in ("GET", "DELETE"):
            assert a.request(method, f"/v1/agents/{named}").status_code == 400
        assert a.post(f"/v1/agents/{named}/fork", json={"n": 1}).status_code == 400
        body = {"model": "claude-x", "max_tokens": 1, "messages": []}
        assert a.post("/v1/messages", json=body, headers={"x-agent-id": named}).status_code == 400

        twice = add(admin, pack, tenant=["c", "b"])
        assert twice.status_code == 409
        assert "tenant 'b' has a pack 'claude-code'" in twice.json()["error"]["message"]
        removed = admin.delete("/admin/packs/claude-code", params={"tenant": ["b", "c"]})
        assert removed.status_code == 404
        assert len(admin.get("/admin/packs").json()["data"]) == 2
        assert admin.delete("/admin/packs/claude-code", params={"tenant": "b"}).status_code == 204
        assert [p["tenant"] for p in admin.get("/admin/packs").json()["data"]] == ["a"]


def test_a_pack_counts_towards_a_quota_and_is_not_evicted(
    maker: Path, pack: bytes, tmp_path: Path
) -> None:
    trust(tmp_path, maker)
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        disk = running.server.memory.disk
        assert disk is not None
        usual = disk.limits
        disk.limits = replace(usual, tenant_bytes=lambda _: 4096)
        answer = add(http, pack)
        assert answer.status_code == 429, answer.text
        assert "quota" in answer.json()["error"]["message"]
        assert http.get("/admin/packs").json()["data"] == []
        assert blocks(running) == 0

        disk.limits = usual
        (found,) = add(http, pack).json()["data"]
        disk.limits = replace(usual, tenant_bytes=lambda _: found["bytes"] + 10_000)
        for number in range(4):
            ask(http, f"{number} " * 500, system=[])
            disk.flush(60)
        assert running.server.memory.cache.store.counts.evictions["disk", "quota"]
        (kept,) = http.get("/admin/packs").json()["data"]
        assert kept["disk_tokens"] == found["tokens"]


# -- what is refused ----------------------------------------------------------------------------


def test_an_unknown_signer_is_refused_until_it_is_trusted(
    maker: Path, pack: bytes, tmp_path: Path
) -> None:
    with run_server(make_settings(tmp_path)) as running, running.client() as http:
        refused = add(http, pack)
        key = keys_of(maker).public
        assert refused.status_code == 400
        assert f"semantic pack trust NAME {key}" in refused.json()["error"]["message"]
        assert blocks(running) == 0
        trust(tmp_path, maker)
        assert add(http, pack, name="other").json()["data"][0]["signer"] == "alice"
        keys_of(tmp_path).untrust("alice")
        assert add(http, pack, name="third").status_code == 400
        assert [p["name"] for p in http.get("/admin/packs").json()["data"]] == ["other"]


def other_abi(items: list[PackItem]) -> Iterator[PackItem]:
    for item in items:
        if isinstance(item, ExportPart):
            yield replace(item, payload=replace(item.payload, abi="fake.v1"))
        else:
            yield item


# By a key that the server trusts: what the signature does not reveal.
FORGERIES: dict[str, tuple[Change, str]] = {
    "first block": (with_altered_block(0), r"block 0 \(\w+\) is not what this model computes"),
    "last block": (with_altered_block(-1), r"block [1-9]\d* \(\w+\) is not what this model"),
    "tokens": (with_tokens(lambda token: token ^ 1), "its text is not that of its tokens"),
    "weights": (with_head(fingerprint="other", model="other"), "with other weights than 'fake'"),
    "abi": (with_head(abi="torch.v1.float32"), "written in torch.v1.float32"),
    "format": (with_head(kv_format="q8g64"), "stored as q8g64"),
    "abi of blocks": (other_abi, "another layout than it states"),
    "gap": (without_block(1), "do not follow each other"),
    "end": (without_block(-1), "not those that it states"),
    "text": (with_head(text="hello"), "its text is not that of its tokens"),
    "name": (with_head(name="../../etc/passwd"), "a pack's name must be"),
    "field": (with_head(num_tokens=-1), "num_tokens"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_pack_is_refused_and_leaves_nothing(
    running: RunningServer, maker: Path, pack: bytes, forgery: str
) -> None:
    change, words = FORGERIES[forgery]
    content = forged(pack, keys_of(maker), change)
    with running.client() as http:
        answer = add(http, content, sample=1)
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert re.search(words, message), message
        assert http.get("/admin/packs").json()["data"] == []
    assert blocks(running) == 0


def test_kv_cache_of_other_tokens_is_found_by_the_smallest_sample(
    running: RunningServer, maker: Path, pack: bytes
) -> None:
    """The text matches the tokens, which a forger can arrange; the KV cache does not."""
    swapped = str.maketrans("gj", "jg")
    tokens = {ord(one): ord(other) for one, other in ("gj", "jg")}
    head = json.loads(members(pack)[0][1])
    content = forged(pack, keys_of(maker), with_tokens(lambda token: tokens.get(token, token)))
    content = forged(content, keys_of(maker), with_head(text=head["text"].translate(swapped)))
    with running.client() as http:
        answer = add(http, content, sample=0.001)
    assert "block 0" in answer.json()["error"]["message"]
    assert blocks(running) == 0


def renamed_member(content: bytes, name: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (old, body) in enumerate(members(content)):
            header = tarfile.TarInfo(name if number == 1 else old)
            header.size = len(body)
            archive.addfile(header, io.BytesIO(body))
    return out.getvalue()


def huge(content: bytes) -> bytes:
    header = tarfile.TarInfo("pack.json")
    header.size = 2**33 - 1
    return header.tobuf(tarfile.USTAR_FORMAT) + content


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def lying_block(content: bytes) -> bytes:
    """A block whose header claims a length of eight exabytes."""
    (head, block, *rest) = members(content)
    body = struct.pack("<Q", 2**63 - 1) + block[1][8:]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in [head, (block[0], body), *rest]:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "truncated"),
    "truncated": (lambda content: content[: len(content) // 2], "truncated"),
    "one bit": (flipped, "does not match"),
    "more": (lambda content: content + b"x", "data follows"),
    "compressed": (gzip.compress, "not an archive of a pack"),
    "a huge member": (huge, "too long"),
    "a huge block": (lying_block, "does not match"),
    "a path": (lambda content: renamed_member(content, "../../.ssh/keys"), "packs do not have"),
    "a root": (lambda content: renamed_member(content, "/etc/passwd"), "packs do not have"),
    "an agent": (lambda content: renamed_member(content, "agent.json"), "packs do not have"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pack_is_refused(running: RunningServer, pack: bytes, damage: str) -> None:
    change, words = DAMAGES[damage]
    with running.client() as http:
        answer = add(http, change(pack))
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]
        assert http.get("/admin/packs").json()["data"] == []
    assert blocks(running) == 0


def test_a_body_beyond_the_disk_budget_is_refused(running: RunningServer) -> None:
    length = running.server.settings.runtime.disk_bytes + 1
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST /admin/packs HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_an_agents_file_cannot_pose_as_a_pack(making: httpx.Client) -> None:
    ask(making, "hi", "poser")
    content = making.get("/v1/agents/poser/export").content
    posing = changed(content, with_member_fields("agent", id="pack:poser"))
    answer = making.post("/v1/agents/import", content=posing)
    assert answer.status_code == 400
    assert "an agent id must be" in answer.json()["error"]["message"]


# -- the command --------------------------------------------------------------------------------


def test_a_pack_goes_from_one_installation_to_another_by_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"

    def run(*words: str, status: int = 0) -> str:
        assert main(words) == status
        printed = capsys.readouterr()
        return printed.out + printed.err

    with run_server(make_settings(theirs)) as running, running.client() as http:
        ask(http, PRIVATE, "coder")
        made = run("pack", "make", "claude-code", "--agent", "coder", "--server", running.url)
        assert "claude-code.pack: " in made
        again = ("pack", "make", "claude-code", "--agent", "coder", "--server", running.url)
        assert "--force" in run(*again, status=2)
    key = run("pack", "key", "--home", str(theirs)).splitlines()[-1]
    shown = run("pack", "show", "claude-code.pack", "--home", str(ours), "--text")
    assert key in shown
    assert "not trusted" in shown
    assert "You are a coding agent." in shown
    assert "zxqvj" not in shown
    with run_server(make_settings(ours)) as running:
        server = ("--server", running.url)
        assert "does not trust" in run("pack", "add", "claude-code.pack", *server, status=2)
        assert "64 hexadecimal" in run(
            "pack", "trust", "alice", "abc", "--home", str(ours), status=2
        )
        run("pack", "trust", "alice", key, "--home", str(ours))
        assert f"{key}  trusted as alice" in run("pack", "key", "--home", str(ours))
        added = run("pack", "add", "claude-code.pack", *server)
        assert "signed by alice; computed" in added
        for name in ("ls", "list"):
            assert "claude-code" in run("pack", name, *server)
        assert "alice" in run("pack", "show", "claude-code.pack", "--home", str(ours))
        assert "removed claude-code" in run("pack", "rm", "claude-code", "-y", *server)
        assert "no packs" in run("pack", "ls", *server)
        run("pack", "untrust", "alice", "--home", str(ours))
        assert "no trusted key" in run("pack", "untrust", "bob", "--home", str(ours), status=2)
