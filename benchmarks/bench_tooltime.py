r"""Work while tools run: time to the first token of tool turns with it and without, over HTTP.

Starts the real server. An agent with a history calls a tool that reads a file, twice: the second
call repeats the first one. The figure is the time to the first token after the second result, in
pairs: without (`ahead_tokens` 0, set while the server runs), then with.

    new      the second call is another one: only the header of the tool message is known
    again    the same file; the tool runs until the server has computed the prompt
    part     the same file, changed in its middle; the tool runs as long
    short    the same file; the tool runs for `--pause` seconds only
    wrong    another result; it arrives after `--pause` seconds, while the server computes
    other    a first turn of another agent, sent after `--pause` seconds while the server computes

The last two show what a wrong prediction costs: nothing but the rest of a step. The tokens of the
replies with and without are compared in every pair.

    python -m benchmarks.bench_tooltime                      # the starter model
    python -m benchmarks.bench_tooltime --shape llama-1b --set weights=int4
    python -m benchmarks.bench_tooltime --shape llama-1b --backend mlx --memory-mb 40000 \
        --history 16000 --result 4000 --pause 0.05 --json tooltime.json
"""

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.bench_ahead import source
from benchmarks.common import add_model_options, serving_chosen
from benchmarks.report import Report, run

CASES = ("new", "again", "part", "short", "wrong", "other")
# Of the first-token time with it, relative to the time without.
MOST = {"new": 1.1, "again": 0.8, "part": 0.9, "short": 1.1, "wrong": 1.15, "other": 1.15}
CHARS_PER_TOKEN = 3  # of source code, about
NUM_REPLY = 4
NUM_MARGIN = 2  # the last token of a call, and that of the prompt


def _read_tool(path: str) -> Any:
    """Return a tool whose only valid call reads `path`, so that any model makes the same call."""
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string", "enum": [path]}},
        "required": ["path"],
        "additionalProperties": False,
    }
    function = {"name": f"read_{path}", "description": "Reads.", "parameters": schema}
    return {"type": "function", "function": {**function, "strict": True}}


TOOLS = [_read_tool("first"), _read_tool("second")]


@dataclass
class Agent:
    """A conversation on a server."""

    http: httpx.Client
    messages: list[Any] = field(default_factory=list)
    num_prompt: int = 0
    num_tokens: int = 0

    def call(self, path: str) -> str:
        """Have the model call the tool that reads `path`; returns the call's id.

        Sets `num_prompt` and `num_tokens`, the lengths before and after it.
        """
        choice = {"type": "function", "function": {"name": f"read_{path}"}}
        body = {**self._body(), "tool_choice": choice, "max_tokens": 200}
        reply = self.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        message = reply["choices"][0]["message"]
        usage = reply["usage"]
        self.num_prompt, self.num_tokens = usage["prompt_tokens"], usage["total_tokens"]
        self.messages.append(message)
        call_id: str = message["tool_calls"][0]["id"]
        return call_id

    def tell(self, call_id: str, content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def answer(self) -> tuple[float, str]:
        """Ask for text; returns the seconds to the first token, and the text."""
        stop = {"tool_choice": "none", "max_tokens": NUM_REPLY, "ignore_eos": True}
        body = {**self._body(), **stop, "stream": True}
        first, text = 0.0, ""
        started = time.perf_counter()
        with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                deltas = [choice["delta"] for choice in json.loads(line[6:])["choices"]]
                piece = "".join(delta.get("content") or "" for delta in deltas)
                if piece and not first:
                    first = time.perf_counter() - started
                text += piece
        return first or time.perf_counter() - started, text

    def _body(self) -> dict[str, Any]:
        return {"model": "any", "messages": self.messages, "tools": TOOLS, "temperature": 0}


@dataclass
class Bench:
    """A server, the sizes of what agents send, and the server's `ahead_tokens`."""

    http: httpx.Client
    num_history: int
    num_result: int
    pause_s: float
    max_ahead: int = 0

    def measure(self, case: str, name: str) -> tuple[float, str]:
        """Run one conversation; returns the seconds of its last turn, and its text."""
        file = text_of(f"{name}_file", self.num_result)
        agent = Agent(self.http, [_user(f"{name}. {text_of(name, self.num_history)}")])
        agent.tell(agent.call("first"), file)
        time.sleep(self.pause_s)  # what is computed ahead after the first call is not counted
        num_before, num_ahead = agent.num_tokens, self.num_ahead()
        other = Agent(self.http, [_user(f"Another. {text_of(f'{name}_other', self.num_result)}")])
        call_id = agent.call("second" if case == "new" else "first")
        # The result that is predicted and what surrounds it take as many tokens as the first one.
        num_expected = agent.num_prompt - num_before - NUM_MARGIN
        time.sleep(self.pause_s)
        while case in ("again", "part") and self.max_ahead:
            if self.num_ahead() - num_ahead >= min(num_expected, self.max_ahead):
                break
            time.sleep(self.pause_s)
        if case == "other":
            return other.answer()
        middle = len(file) // 2
        changed = {"wrong": text_of(f"{name}_wrong", self.num_result)}
        changed["part"] = file[:middle] + changed["wrong"][middle:]
        agent.tell(call_id, changed.get(case, file))
        return agent.answer()

    def num_ahead(self, kind: str = "") -> int:
        """Tokens that the server has computed ahead so far; `kind`: `_used` or `_wasted`."""
        shown = self.http.get("/metrics").text
        found = re.search(rf"^semantic_tokens_ahead{kind}_total (\S+)", shown, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def compute_ahead(self, num_tokens: int) -> None:
        self.max_ahead = num_tokens
        body = {"ahead_tokens": num_tokens}
        self.http.patch("/admin/runtime", json=body).raise_for_status()


def text_of(name: str, num_tokens: int) -> str:
    """Return source code of about so many tokens, whose names begin with `name`."""
    size = num_tokens * CHARS_PER_TOKEN
    return source(name, 6 * (size // len(source(name, 1)) + 1))[:size]


def _user(content: str) -> Any:
    return {"role": "user", "content": content}


def compare(report: Report, bench: Bench, case: str) -> None:
    """Measure in pairs after a warm-up pair; adds the figures to the report."""
    options, pairs = report.options, []
    for number in range(1 + options.rounds):
        found = []
        before = [bench.num_ahead(kind) for kind in ("", "_used")]
        for num_ahead in (0, options.ahead_tokens):
            bench.compute_ahead(num_ahead)
            # The prompts of a pair have equal lengths and share no beginning.
            found.append(bench.measure(case, f"{case}{number}{'ab'[num_ahead > 0]}"))
        bench.compute_ahead(0)
        ahead, used = (bench.num_ahead(k) - b for k, b in zip(("", "_used"), before, strict=True))
        (without, _), (with_it, text) = found
        _, again = bench.measure(case, f"{case}{number}b")
        report.note(
            f"{case} {number}: {without:.3f} and {with_it:.3f} s; {ahead} tokens computed ahead, "
            f"{used} used{', OTHER TEXT' if text != again else ''}"
        )
        pairs += [(without, with_it)] if number else []
    report.add(f"{case}, without", [without for without, _ in pairs], "s")
    report.add(f"{case}, with", [with_it for _, with_it in pairs], "s")
    ratios = [with_it / without for without, with_it in pairs]
    report.add(f"{case}, with over without", ratios, most=None if report.is_quick else MOST[case])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_model_options(parser)
    parser.add_argument("--history", type=int, default=1500, help="tokens before the first call")
    parser.add_argument("--result", type=int, default=1000, help="tokens of a tool's result")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds of a short tool")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead-tokens", type=int, default=4096)
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES)


def measure(report: Report) -> None:
    """Start the server and run the selected cases."""
    options = report.options
    if report.is_quick:
        options.history, options.result, options.rounds = 300, 200, 1
    report.settings.update({name: str(value) for name, value in vars(options).items()})
    with serving_chosen(options) as port:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=None) as http:  # noqa: S113 - who measures waits
            bench = Bench(http, options.history, options.result, options.pause)
            for case in options.only:
                compare(report, bench, case)


if __name__ == "__main__":
    sys.exit(run("tooltime", measure, add_options=add_options))
