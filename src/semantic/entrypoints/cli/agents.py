"""`semantic agents`: list, show, fork, compare, compact, rewind, rename, export, delete agents."""

import functools
import re
import tempfile
from difflib import SequenceMatcher
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from semantic.domain.agents import check_agent_id
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.client import Json, ServerClient, file_pieces
from semantic.entrypoints.cli.flags import (
    Answer,
    AsJson,
    Yes,
    print_json,
    require_confirmation,
    with_server,
)
from semantic.entrypoints.cli.screen import (
    Spinner,
    age,
    agents_table,
    message_text,
    place,
    reuse_bar,
    say,
    shorten,
    size,
    table,
    transfer_progress,
)

agents_app = typer.Typer(
    help="List, show, fork, compare, compact, rewind, rename, export and delete agents.",
    no_args_is_help=True,
)


def _checked(value: str | list[str]) -> str | list[str]:
    """Refuse invalid agent ids, which could change the path of a request."""
    for agent in [value] if isinstance(value, str) else value:
        check_agent_id(agent, "AGENT")
    return value


AgentArgument = functools.partial(typer.Argument, metavar="AGENT", callback=_checked)
AgentId = Annotated[str, AgentArgument()]
_SAID_WIDTH = 60
_SIDES = ("green", "magenta")  # of a comparison
_WORD = re.compile(r"\s+|\S+")
_USUAL_SETTINGS: Json = {
    "tools": [],
    "class": "interactive",
    "weight": 1.0,
    "pin": False,
    "overflow": "error",
    "quota": {"max_bytes": None, "max_turns": None},
    "labels": {},
}
_MANY = 1_000  # the most agents whose turns a graph reads


@agents_app.command("ls")
@agents_app.command("list", hidden=True)
@with_server
def list_agents(
    client: ServerClient,
    *,
    prefix: Annotated[str | None, typer.Option(help="only ids that begin with this")] = None,
    label: Annotated[
        str | None, typer.Option(help="only agents with this label, NAME:VALUE")
    ] = None,
) -> Answer:
    """List agents, the most recently used first (also: `list`)."""
    wanted = {"prefix": prefix, "label": label}
    query = {name: value for name, value in wanted.items() if value is not None}
    with Spinner("reading agents"):
        agents = list(client.pages("/v1/agents", "after", **query))
    none = "no agents; `semantic chat NAME` creates one"
    return Answer(agents, agents_table(agents) if agents else none)


@agents_app.command()
@with_server
def show(client: ServerClient, agent: AgentId) -> Answer:
    """Show an agent: its settings, where its KV cache is, and what its latest turn reused."""
    found = client.call("GET", f"/v1/agents/{agent}")
    why = client.call("GET", f"/v1/agents/{agent}/explain")
    state = found["state"]
    rows = {
        "agent": found["id"],
        "cache": place(state),
        "turns": f"{found['turns']:,}, {found['tokens']:,} tokens",
        "memory": f"{size(state['memory_bytes'])}, {state['memory_tokens']:,} tokens",
        "disk": f"{size(state['disk_bytes'])}, {state['disk_tokens']:,} tokens",
        "note": state.get("note", ""),
        "created": f"{age(found['created_at'])} ago",
        "used": f"{age(found['last_used'])} ago",
        "reuse": reuse_bar(why["reuse"]),
    }
    rows |= {
        name: str(value)
        for name, value in found["settings"].items()
        if value != _USUAL_SETTINGS.get(name)
    }
    made = table("", "~")
    for name, value in rows.items():
        if value:
            made.add_row(Text(name, "dim"), value)
    return Answer({**found, "explanation": why}, Group(made, Text(why["summary"])))


@agents_app.command()
@with_server
def explain(
    client: ServerClient,
    agent: AgentId,
    *,
    turn: Annotated[
        str | None, typer.Option(help="explain this turn (default: the latest)")
    ] = None,
) -> Answer:
    """Show what a turn's prompt reused, and where it diverged from the stored conversation."""
    query = {"turn_id": turn} if turn else {}
    why = client.call("GET", f"/v1/agents/{agent}/explain", params=query)
    return Answer(why, explanation(why))


def explanation(why: Json) -> Group:
    """Draw the server's explanation of a turn."""
    lines = [reuse_bar(why["reuse"]), Text(why["summary"])]
    if left := why["diverged"]:
        lines.append(Text(f"…{left['before']}", "dim"))
        lines.append(Text(f"- {left['expected']}", "red"))
        lines.append(Text(f"+ {left['actual']}", "green"))
    return Group(*lines)


@agents_app.command("print")
@with_server
def print_conversation(
    client: ServerClient,
    agent: AgentId,
    *,
    limit: Annotated[
        int | None, typer.Option("-n", "--limit", min=1, help="only this many latest turns")
    ] = None,
) -> Answer:
    """Print an agent's conversation, the oldest message first."""
    turns = list(islice(client.pages(f"/v1/agents/{agent}/turns", "before"), limit))
    messages = [message for turn in reversed(turns) for message in turn["messages"]]
    lines = []
    for message in messages:
        lines += [Text(message["role"], "bold"), Text(f"{message_text(message).strip()}\n")]
    return Answer(messages, Group(*lines) if lines else f"{agent} has no turns yet")


@agents_app.command()
@with_server
def log(
    client: ServerClient,
    agent: AgentId,
    *,
    graph: Annotated[
        bool, typer.Option("--graph", help="show a tree, with the forks that share turns")
    ] = False,
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=1, help="maximum number of turns")
    ] = 20,
) -> Answer:
    """Show an agent's turns, the latest first; with --graph as a tree, the oldest first."""
    if graph:
        with Spinner("reading turns of all agents"):
            turns, heads = _family(client, agent)
        found = {"turns": list(turns.values()), "heads": heads}
        return Answer(found, turn_tree(turns, heads, agent))
    listed = list(islice(client.pages(f"/v1/agents/{agent}/turns", "before"), limit))
    lines = []
    for turn in listed:
        asked, replied = _turn_texts(turn)
        line = Text(turn["id"], "yellow").append(f"  {age(turn['created_at'])} ago  ", "dim")
        said = Text(f"  > {asked}\n  < {replied}", no_wrap=True, overflow="ellipsis")
        lines += [line.append(reuse_bar(turn["reuse"])), said]
    return Answer(listed, Group(*lines) if lines else f"{agent} has no turns yet")


@agents_app.command()
@with_server
def compare(
    client: ServerClient, agent: AgentId, other: Annotated[str, AgentArgument(metavar="OTHER")]
) -> Answer:
    """Show what two agents have in common, and their later turns with the words that differ."""
    found = client.call("GET", f"/v1/agents/{agent}/compare", params={"with": other})
    turns, tokens = found["common_turns"], found["common_tokens"]
    shared = f"{turns:,} turn{'' if turns == 1 else 's'} in common, {tokens:,} tokens computed once"
    lines = [Text(shared if turns else "no turns in common", "dim")]
    for number, pair in enumerate(zip_longest(found["first"], found["second"]), turns + 1):
        lines.append(Text(f"\nturn {number}", "bold"))
        texts = [_spoken(turn) if turn else "" for turn in pair]
        for name, text, style in zip((agent, other), texts, _SIDES, strict=True):
            beside = texts[1] if text is texts[0] else texts[0]
            said = _marked(text, beside, style) if text else Text("(no turn)", "dim")
            lines.append(Text(name, style).append("\n").append_text(said))
    return Answer(found, Group(*lines))


@agents_app.command()
@with_server
def fork(
    client: ServerClient,
    agent: AgentId,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="a name for each fork")
    ] = None,
    *,
    number: Annotated[
        int, typer.Option("-n", min=1, help="without names: number of forks, with random names")
    ] = 1,
    turn: Annotated[
        str | None, typer.Option(help="fork from this turn (default: the latest)")
    ] = None,
) -> Answer:
    """Fork an agent; nothing is copied or computed."""
    body: Json = {"ids": names} if names else {"n": number}
    if turn:
        body["turn_id"] = turn
    made = client.call("POST", f"/v1/agents/{agent}/fork", json=body)["data"]
    return Answer(made, "\n".join(one["id"] for one in made))


@agents_app.command()
@with_server
def compact(
    client: ServerClient,
    agent: AgentId,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="name of the branch (default: random)")
    ] = None,
    *,
    keep_turns: Annotated[
        int | None, typer.Option(min=0, help="latest turns that stay as they are")
    ] = None,
    instructions: Annotated[
        str | None, typer.Option(help="the message that asks for the summary")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest summary")] = None,
) -> Answer:
    """Make a branch that continues from a summary; the agent itself does not change."""
    wanted = {
        "id": name,
        "keep_turns": keep_turns,
        "instructions": instructions,
        "max_tokens": max_tokens,
    }
    body = {field: value for field, value in wanted.items() if value is not None}
    with Spinner(f"summarising {agent}"):
        made = client.call("POST", f"/v1/agents/{agent}/compact", json=body)
    before, after = made["tokens_before"], made["tokens_after"]
    shown = f"{made['agent']['id']}: {before:,} tokens became {after:,}\n\n{made['summary']}"
    return Answer(made, shown)


@agents_app.command()
@with_server
def rewind(
    client: ServerClient,
    agent: AgentId,
    turn: Annotated[
        str, typer.Argument(metavar="TURN", help="a turn's id, or how many turns to go back")
    ] = "1",
) -> Answer:
    """Go back to an earlier turn; later turns stay in the log until garbage collection."""
    found = client.call(
        "POST", f"/v1/agents/{agent}/rewind", json={"turn_id": find_turn(client, agent, turn)}
    )
    head = found["head"] or "before the first"
    return Answer(found, f"{agent} is at turn {found['turns']}, {head}")


@agents_app.command()
@with_server
def pin(
    client: ServerClient,
    agent: AgentId,
    *,
    off: Annotated[bool, typer.Option("--off", help="unpin it")] = False,
) -> Answer:
    """Keep an agent's KV cache on disk, even if that exceeds the disk budget."""
    found = client.call("PATCH", f"/v1/agents/{agent}", json={"pin": not off})
    return Answer(found, f"{agent} is {'not ' if off else ''}pinned")


@agents_app.command()
@with_server
def rename(
    client: ServerClient, agent: AgentId, name: Annotated[str, AgentArgument(metavar="NAME")]
) -> Answer:
    """Give an agent another name; its turns, settings and KV cache stay."""
    found = client.call("GET", f"/v1/agents/{agent}")
    if found["busy"]:
        raise InvalidRequestError(f"{agent} is generating a reply; rename it when that has ended")
    # If a later request fails, both names exist and nothing is lost.
    client.call("POST", f"/v1/agents/{agent}/fork", json={"ids": [name]})
    pinned = {"pin": found["settings"]["pin"]}  # a fork is not pinned
    made = client.call("PATCH", f"/v1/agents/{name}", json=pinned)
    client.call("DELETE", f"/v1/agents/{agent}")
    return Answer(made, f"{agent} is now {name}")


@agents_app.command("rm")
@with_server
def remove(
    client: ServerClient,
    agents: Annotated[list[str], AgentArgument()],
    *,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete agents; forks keep the turns they share."""
    require_confirmation(f"delete {', '.join(agents)}?", is_given=yes)
    for agent in agents:
        client.call("DELETE", f"/v1/agents/{agent}")
        if not as_json:
            say(f"deleted {agent}")
    if as_json:
        print_json({"deleted": agents})


@agents_app.command("export")
@with_server
def export_agent(
    client: ServerClient,
    agent: AgentId,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="default: AGENT.tar")] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> Answer:
    """Write an agent, with its turns and its KV cache, into one file."""
    target = file or Path(f"{agent}.tar")
    path = f"/v1/agents/{agent}/export"
    nbytes = download_file(client, path, target, f"exporting {agent}", force=force)
    written = {"agent": agent, "file": str(target), "bytes": nbytes}
    return Answer(written, f"{target}: {size(nbytes)}")


@agents_app.command("import")
@with_server
def import_agent(
    client: ServerClient,
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False)],
    *,
    agent_id: Annotated[str | None, typer.Option("--id", help="another name for the agent")] = None,
    messages_only: Annotated[
        bool, typer.Option("--messages-only", help="import only the messages, not the KV cache")
    ] = False,
) -> Answer:
    """Read an agent from a file that `export` wrote."""
    query: Json = {"messages_only": str(messages_only).lower()}
    if agent_id:
        query["id"] = agent_id
    with transfer_progress() as progress:
        pieces = progress.track(
            file_pieces(file), total=-(-file.stat().st_size // 2**20), description="importing"
        )
        found = client.call("POST", "/v1/agents/import", content=iter(pieces), params=query)
    state = f"state {found['import_state']} ({found['import_reason']})"
    return Answer(found, f"{found['id']}: at turn {found['turns']:,}; {state}")


def download_file(client: ServerClient, path: str, target: Path, title: str, *, force: bool) -> int:
    """Download a file, which appears when it is complete; returns its size in bytes.

    Raises:
        InvalidRequestError: the file exists, and `force` is False.
    """
    if target.exists() and not force:
        raise InvalidRequestError(f"{target} exists; choose another file, or use --force")
    prefix = f"{target.name}."
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
        part = Path(scratch, target.name)
        with part.open("wb") as sink, transfer_progress() as progress:
            task = progress.add_task(title, total=None)
            for nbytes in client.download(path, sink):
                progress.advance(task, nbytes)
        part.replace(target)
    return target.stat().st_size


# -- turns -----------------------------------------------------------------------------------------


def find_turn(client: ServerClient, agent: str, wanted: str) -> str | None:
    """Resolve a turn, given by its id or by how many turns to go back; None is the beginning.

    Raises:
        InvalidRequestError: the agent has fewer turns than that.
    """
    if not wanted.isdecimal():
        return wanted
    back = int(wanted)
    path: list[Json] = []
    for turn in client.pages(f"/v1/agents/{agent}/turns", "before"):
        path.append(turn)
        if len(path) > back:
            return str(turn["id"])
    if back > len(path):
        turns = "1 turn" if len(path) == 1 else f"{len(path)} turns"
        raise InvalidRequestError(f"cannot rewind {back} turns: {agent} has {turns}")
    return None


def _family(client: ServerClient, agent: str) -> tuple[dict[str, Json], dict[str, str | None]]:
    """All turns of the agents that share a turn with this one, and the head of each agent."""
    turns = {turn["id"]: turn for turn in client.pages(f"/v1/agents/{agent}/turns", "before")}
    heads: dict[str, str | None] = {agent: client.call("GET", f"/v1/agents/{agent}")["head"]}
    for count, other in enumerate(client.pages("/v1/agents", "after")):
        if count == _MANY:
            break
        theirs = {t["id"]: t for t in client.pages(f"/v1/agents/{other['id']}/turns", "before")}
        if theirs.keys() & turns.keys():
            turns |= theirs
            heads[other["id"]] = other["head"]
    return turns, heads


def turn_tree(turns: dict[str, Json], heads: dict[str, str | None], agent: str) -> Tree:
    """Draw turns as a tree that indents only where conversations diverge.

    A turn stands below the turn before it. It is indented if one of the two has siblings, or if the
    turn before it is the head of an agent.
    """
    children: dict[str | None, list[Json]] = {}
    for turn in sorted(turns.values(), key=lambda one: float(one["created_at"])):
        parent = turn["parent"] if turn["parent"] in turns else None
        children.setdefault(parent, []).append(turn)
    names: dict[str | None, list[str]] = {}
    for name, head in heads.items():
        names.setdefault(head, []).append(name)
    root = Tree(Text(agent, "bold"), guide_style="dim")
    todo = [(root, turn) for turn in reversed(children.get(None, []))]
    while todo:
        branch, turn = todo.pop()
        node = branch.add(_turn_line(turn, names.get(turn["id"], [])))
        following = children.get(turn["id"], [])
        parent = turn["parent"] if turn["parent"] in turns else None
        is_alone = len(following) == 1 and len(children[parent]) == 1
        is_line = is_alone and turn["id"] not in names  # else another agent goes on from a head
        below = branch if is_line else node
        todo += [(below, one) for one in reversed(following)]
    return root


def _spoken(turn: Json) -> str:
    said = [m for m in turn["messages"] if m["role"] != "system"]
    return "\n".join(message_text(message).strip() for message in said)


def _marked(text: str, other: str, style: str) -> Text:
    """Underline the words of a text that another one does not have in this place."""
    words, others = _WORD.findall(text), _WORD.findall(other)
    made = Text()
    matches = SequenceMatcher(None, words, others, autojunk=False).get_opcodes()
    for kind, start, end, *_ in matches:
        is_own = bool(other) and kind != "equal"
        made.append("".join(words[start:end]), f"{style} underline" if is_own else "")
    return made


def _turn_line(turn: Json, heads: list[str]) -> Text:
    asked, replied = _turn_texts(turn)
    line = Text(turn["id"][-8:], "yellow", no_wrap=True, overflow="ellipsis")
    for name in heads:
        line.append(f" ({name})", "bold green")
    return line.append(f" {asked} ").append(f"→ {replied}", "dim")


def _turn_texts(turn: Json) -> tuple[str, str]:
    replies = [m for m in turn["messages"] if m["role"] == "assistant"]
    asked = [m for m in turn["messages"] if m["role"] in ("user", "tool")]
    mark = "(stopped) " if turn["finish_reason"] == "cancelled" else ""
    return (
        shorten(message_text(asked[-1]), _SAID_WIDTH) if asked else "",
        mark + shorten(message_text(replies[-1]), _SAID_WIDTH) if replies else mark,
    )
