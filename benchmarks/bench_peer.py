"""This server compared with llama.cpp on the same file and machine, interleaved, over HTTP.

Measures one stream, eight streams, prompts of 512 and 4,096 tokens, and the workflow of five agents
with a restart, on an idle machine and beside a busy loop on each core. Drafts are on in the
workflow alone: replies without an end repeat themselves, and drafts would count for too much.
`make peer` builds llama.cpp.

    python -m benchmarks.bench_peer --json peer.json
    python -m benchmarks.bench_peer --shape 1b --only one prefill --conditions quiet
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import gguf
import numpy as np

from benchmarks.bench_workflow import PHASES, Talk, conversations, run_workflow, text_of
from benchmarks.client import Client, said
from benchmarks.common import serving
from benchmarks.peer import peer_path, peer_serving, peer_version
from benchmarks.report import Report, run
from benchmarks.systems import System
from semantic.adapters.outbound.models.gguf.importing import starter_gguf

SCENARIOS = ("one", "eight", "prefill", "workflow")
CONDITIONS = ("quiet", "busy")
NUM_AGENTS, AGENT_TOKENS = 5, 1024
MOST_START_S, MOST_BUSY = 5.0, 2.5
ROUNDS = 3
SHAPES = ("starter", "1b")
# Goals: this server over llama.cpp, on an idle machine.
LEAST = {
    "one stream": 1.2,
    "eight streams": 2.0,
    "prefill": 2.0,
    "workflow": 4.0,
    "after a restart": 40.0,
}
_HIDDEN, _INNER, _LAYERS, _KEYS = 2048, 8192, 16, 512


# -- the model -------------------------------------------------------------------------------------


def write_1b(path: Path) -> None:
    """Write a GGUF file shaped like Llama 3.2 1B: random 4-bit weights, the starter's tokens."""
    reader, writer = gguf.GGUFReader(starter_gguf()), gguf.GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HIDDEN // 64)
    writer.add_head_count_kv(_KEYS // 64)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(64)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kinds = (field.types[0], field.types[-1] if len(field.types) > 1 else None)
            writer.add_key_value(name, field.contents(), *kinds)
    shapes = {"attn_q": (_HIDDEN, _HIDDEN), "attn_k": (_KEYS, _HIDDEN), "attn_v": (_KEYS, _HIDDEN)}
    shapes |= {"attn_output": (_HIDDEN, _HIDDEN), "ffn_gate": (_INNER, _HIDDEN)}
    shapes |= {"ffn_up": (_INNER, _HIDDEN), "ffn_down": (_HIDDEN, _INNER)}
    _add_random(writer, "token_embd.weight", (49_152, _HIDDEN))
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            _add_random(writer, f"blk.{layer}.{name}.weight", shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(_HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_random(writer: gguf.GGUFWriter, name: str, shape: tuple[int, int]) -> None:
    """Add random Q4_1 weights: a scale, a minimum and 16 bytes for every 32 weights."""
    blocks = np.empty((shape[0], shape[1] // 32, 20), np.uint8)
    random = np.random.default_rng(len(name) + shape[0])
    blocks[..., 4:] = random.integers(0, 256, (*blocks.shape[:2], 16), np.uint8)
    blocks[..., :4] = np.array([0.004, -0.03], np.float16).view(np.uint8)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=kind)


# -- the servers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """A server that can be started, and the time its last start took."""

    name: str
    open: Callable[[Path], contextlib.AbstractContextManager[int]]
    took: list[float]

    @contextlib.contextmanager
    def start(self, home: Path) -> Iterator[str]:
        started = time.perf_counter()
        with self.open(home) as port:
            self.took.append(time.perf_counter() - started)
            yield f"http://127.0.0.1:{port}/v1"

    @property
    def system(self) -> System:
        return System(self.name, self.start, more={"ignore_eos": True, "cache_prompt": True})


@dataclass(frozen=True)
class Servers:
    """This server, the same without drafts, and llama.cpp's, on the same file."""

    ours: Timed
    undrafted: Timed
    theirs: Timed


def make_servers(source: str, file: Path, cache: Path) -> Servers:
    """Create the servers; each starts when it is needed."""
    settings = {"model_aliases": "any", "max_batch_size": "16", "max_idle": "8"}
    arguments = ("--model", source, "--cache-dir", str(cache), "--memory-budget-mb", "4096")

    def ours(home: Path) -> contextlib.AbstractContextManager[int]:
        return serving(*arguments, "--home", str(home), settings=settings)

    def undrafted(home: Path) -> contextlib.AbstractContextManager[int]:
        return serving(*arguments, "--home", str(home), settings={**settings, "draft_tokens": "0"})

    def theirs(_: Path) -> contextlib.AbstractContextManager[int]:
        return peer_serving(file, streams=8, context=8192)

    took: list[float] = []
    return Servers(
        ours=Timed("semantic", ours, took),
        undrafted=Timed("semantic", undrafted, took),
        theirs=Timed("llama.cpp", theirs, []),
    )


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run programs that each keep a core busy."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(count)]  # noqa: S603 - our own
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


# -- what is asked ---------------------------------------------------------------------------------


async def streams(client: Client, count: int, num_tokens: int, start: int) -> float:
    """Return the tokens per second of streams in sum, while all of them decode.

    Servers begin streams together or one after the other. Prompts that are computed in the
    meantime belong to `prefill`, so the time begins with the first token of the last stream.

    Raises:
        RuntimeError: the first stream ended before the last began.
    """
    asked = (
        client.ask(said(text_of(40, start + 50 * i) + "\nTell me more."), num_tokens)
        for i in range(count)
    )
    replies = await asyncio.gather(*asked)
    begin = max(reply.arrivals[0] for reply in replies)
    end = min(reply.arrivals[-1] for reply in replies)
    if begin >= end:
        raise RuntimeError("the first stream ended before the last began")
    # Some tokens are no text of their own, so a piece is on average a little more than a token.
    tokens = (
        sum(begin < at <= end for at in reply.arrivals) * reply.num_tokens / len(reply.arrivals)
        for reply in replies
    )
    return sum(tokens) / (end - begin)


async def prefill(client: Client, num_tokens: int, start: int) -> float:
    """Return prompt tokens per second up to the first token of the reply."""
    reply = await client.ask(said(text_of(num_tokens - 40, start) + "\nWhat matters?"), 4)
    return reply.num_prompt / reply.first


class Comparison:
    """Both servers under one condition."""

    def __init__(self, report: Report, servers: Servers, home: Path) -> None:
        self._report, self._servers, self._home = report, servers, home

    def run(self, condition: str) -> None:
        only, place = self._report.options.only, 1000 * CONDITIONS.index(condition)
        with contextlib.ExitStack() as stack:
            servers = (self._servers.undrafted, self._servers.theirs)
            clients = [Client(stack.enter_context(s.start(self._home))) for s in servers]
            for client in clients:
                asyncio.run(client.ask(said("Good morning."), 2))
            for name, count, num_tokens in (("one", 1, 96), ("eight", 8, 64)):
                if name in only:
                    rounds = [
                        [asyncio.run(streams(c, count, num_tokens, where)) for c in clients]
                        for where in range(place + 20_000 + 500 * count, 40_000, 400)[:ROUNDS]
                    ]
                    rates = [median(rates) for rates in zip(*rounds, strict=True)]
                    self._tell(f"{condition}, {name} stream{'s' * (count > 1)}", rates)
            lengths = self._report.choose((512,), (512, 4096))
            for length in lengths if "prefill" in only else ():
                rates = [asyncio.run(prefill(c, length, place + 30_000 + length)) for c in clients]
                self._tell(f"{condition}, prefill of {length}", rates)
        if "workflow" in only:
            self._workflow(condition)

    def _workflow(self, condition: str) -> None:
        talks = [
            Talk(server.system, self._home, conversations(NUM_AGENTS, AGENT_TOKENS), 32)
            for server in (self._servers.ours, self._servers.theirs)
        ]
        for talk in talks:
            for message in (message for messages in talk.talks for message in messages):
                message["content"] = f"{condition}: {message['content']}"
        run_workflow(talks, 2, lambda text: print(f"    {text}", flush=True))
        walls = [talk.walls["first"] + talk.walls["later"] for talk in talks]
        self._tell(f"{condition}, workflow", walls, "s")
        waits = [median(talk.firsts[PHASES[2]]) for talk in talks]
        self._tell(f"{condition}, first token {PHASES[2]}", waits, "s")

    def _tell(self, name: str, figures: Sequence[float], unit: str = "tokens/s") -> None:
        ours, theirs = figures
        self._report.add(f"{name}, semantic", ours, unit)
        self._report.add(f"{name}, llama.cpp", theirs, unit)
        least = None
        if name.startswith("quiet"):
            least = next((least for words, least in LEAST.items() if words in name), None)
        ratio = theirs / ours if unit == "s" else ours / theirs
        self._report.add(f"{name}: ratio", ratio, "times as good", least=least)
        print(f"    {name}: {ours:.2f} against {theirs:.2f} {unit}, {ratio:.2f}x", flush=True)


def measure(report: Report) -> None:
    """Compare the servers under every condition."""
    options = report.options
    if report.is_quick:
        options.only, options.conditions = ("one", "eight", "prefill"), CONDITIONS[:1]
    if not peer_path().exists():
        report.note("SKIP: llama.cpp's server is not built; run `make peer`")
        return
    report.settings["llama.cpp"] = peer_version()
    with tempfile.TemporaryDirectory() as temporary:
        home, file, source = options.home or Path(temporary), starter_gguf(), "starter"
        if options.shape == "1b":
            file = Path(temporary) / "llama-1b-random-q4_1.gguf"
            write_1b(file)
            source = str(file)
        servers = make_servers(source, file, Path(temporary) / "cache")
        with servers.ours.start(home):
            pass  # the first start imports the file and builds what it needs
        compared = Comparison(report, servers, home)
        for condition in options.conditions:
            with busy_loops((os.cpu_count() or 1) * (condition == "busy")):
                compared.run(condition)
        report.add("start to ready, second start", servers.ours.took[1], "s", most=MOST_START_S)
        report.add("start to ready, llama.cpp", servers.theirs.took[0], "s")
    names = [f"{condition}, workflow, semantic" for condition in CONDITIONS]
    if all(name in report.figures for name in names):
        quiet, busy = (report.figures[name].median for name in names)
        report.add("workflow, busy over quiet", busy / quiet, most=MOST_BUSY)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--shape", choices=SHAPES, default="starter")
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--conditions", nargs="*", choices=CONDITIONS, default=CONDITIONS)
    parser.add_argument("--home", type=Path, help="home of this server; default: a new one")


if __name__ == "__main__":
    sys.exit(run("peer", measure, add_options=add_options))
