"""Time to render a long conversation again after one more message.

Prints one table, for the starter model's own template and one of Qwen's shape with tools: the
first rendering, with empty caches, and the median of later turns. The bound applies to CPU time,
because wall-clock time depends on other programs. The target is a 20k-token conversation in less
than 20 ms.
"""

import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report, run, seconds
from benchmarks.starter import TEXT, starter_directory
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.application.prompt.renderer import Renderer
from semantic.application.prompt.replay import ReplayStore, TenantReplays
from semantic.domain.chat import (
    ChatRequest,
    JsonObject,
    Message,
    Role,
    TextPart,
    ToolResultPart,
    ToolSpec,
    ToolUsePart,
)
from tests.templates import QWEN

NUM_TOOLS, NUM_TURNS, NUM_ROUNDS = 20, 36, 9
AIM_MS = 20


def conversation(num_turns: int) -> ChatRequest:
    """Build a coding agent's conversation; two thirds are tools and their results."""
    messages = [Message.of(Role.SYSTEM, TEXT * 12)]
    for turn in range(num_turns):
        use = ToolUsePart(f"toolu_{turn}", "tool_3", {"path": f"src/file_{turn}.py", "limit": turn})
        result = ToolResultPart(use.id, (TextPart(f"{turn}: {TEXT * 2}"),))
        messages += [
            Message.of(Role.USER, f"Question {turn}. {TEXT[:120]}"),
            Message(Role.ASSISTANT, (TextPart(f"I will look ({turn})."), use)),
            Message(Role.USER, (result,)),
            Message.of(Role.ASSISTANT, f"Answer {turn}: {TEXT[:200]}"),
        ]
    tools = tuple(ToolSpec(f"tool_{i}", TEXT, _schema()) for i in range(NUM_TOOLS))
    return ChatRequest("m", (*messages, Message.of(Role.USER, "And now?")), tools)


def _schema() -> JsonObject:
    names = ("path", "limit", "offset", "pattern")
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": TEXT[:90]} for name in names},
        "required": ["path"],
    }


def times_ms(tokenizer: HFTokenizer, num_rounds: int) -> tuple[int, float, list[float]]:
    """Return the number of tokens, ms of the first rendering, and CPU ms of later ones."""
    renderer, request = Renderer(tokenizer), conversation(NUM_TURNS)
    replays = TenantReplays(b"root", ReplayStore())
    first = seconds(lambda: renderer.render(request, replays=replays)) * 1e3
    times, num_tokens = [], 0
    for number in range(num_rounds):
        more = (Message.of(Role.ASSISTANT, f"Yes {number}."), Message.of(Role.USER, "Go on."))
        request = replace(request, messages=(*request.messages, *more))
        started = time.process_time()
        num_tokens = len(renderer.render(request, replays=replays).tokens)
        times.append((time.process_time() - started) * 1e3)
    return num_tokens, first, times


def measure(report: Report) -> None:
    """Measure both templates."""
    directory = starter_directory()
    with tempfile.TemporaryDirectory() as name:
        other = Path(name)
        shutil.copy(directory / "tokenizer.json", other)
        config = {"chat_template": QWEN, "eos_token": "<|im_end|>"}
        (other / "tokenizer_config.json").write_text(json.dumps(config))
        for template, place in (("starter", directory), ("qwen", other)):
            num_tokens, first, times = times_ms(HFTokenizer(place), NUM_ROUNDS)
            report.settings[template] = f"{num_tokens} tokens"
            report.add(f"{template}, first", first, "ms")
            report.add(f"{template}, again (CPU time)", times, "ms", most=AIM_MS)


if __name__ == "__main__":
    sys.exit(run("render", measure))
