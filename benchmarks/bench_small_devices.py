r"""Small GPUs: what fits, what the server refuses, and whether it keeps every agent.

For each size, another process takes the rest of the GPU's memory, so that an allocation above the
size fails as it would on such a device. The server gets the size with `device_memory_mb`. Agents
then send prompts of a fifth of the context and further turns, all at once; then two send prompts of
nearly the whole context at once, and one a longer prompt. Each request is answered or refused with
status 400 or 429. After a restart, every agent that was answered sends another turn.

    python -m benchmarks.bench_small_devices --shape llama-8b --bits 4 --sizes-mb 8000 12000 16000
    python -m benchmarks.bench_small_devices                           # tiny, any machine with MLX
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench_beside import TOKENS_PER_TEXT, note_memory
from benchmarks.bench_served import TEXT
from benchmarks.client import Client, Messages, Reply, continued, said
from benchmarks.common import serving
from benchmarks.random_models import SHAPES, make_model
from benchmarks.report import Report, run

NUM_AGENTS, NUM_TURNS, NUM_LARGE, REPLY = 8, 3, 2, 64
SHARE, LARGE_SHARE, TOO_LARGE_SHARE = 0.2, 0.9, 1.2  # of the context

# Takes memory until only so many bytes are free, and holds it until its input ends.
_HOLDER = """
import ctypes, sys
driver = ctypes.CDLL("libcuda.so.1")
def call(name, *given):
    if status := getattr(driver, name)(*given):
        sys.exit(f"{name} failed: {status}")
context, held = ctypes.c_void_p(), ctypes.c_void_p()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
call("cuMemAlloc_v2", ctypes.byref(held), ctypes.c_size_t(free.value - int(sys.argv[1])))
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
print(free.value, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding_all_but(num_bytes: int) -> Iterator[int]:
    """Hold the GPU's memory but for so many bytes; yields how many are free."""
    with subprocess.Popen(  # noqa: S603 - the constant above
        [sys.executable, "-c", _HOLDER, str(num_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        yield int(process.stdout.readline())
        process.stdin.close()


def make_quantised(shape: str, bits: int, directory: Path, tokenizer: Path) -> Path:
    """Write a model of a shape in so many bits, in mlx-community's format, unless it exists."""
    from mlx_lm import convert  # noqa: PLC0415 - needs MLX

    full, packed = make_model(shape, directory, tokenizer), directory / f"{shape}-{bits}bit"
    if not packed.exists():
        convert(str(full), str(packed), quantize=True, q_bits=bits, q_group_size=64)
    return packed


class Crowd:
    """Agents of one server: what each has said, and what became of all requests."""

    def __init__(self, port: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.talks: dict[str, Messages] = {}
        self.reused: list[float] = []
        self._url = f"http://127.0.0.1:{port}"

    @property
    def num_failed(self) -> int:
        return self.outcomes.total() - sum(
            self.outcomes[name] for name in ("answered", "status 400", "status 429")
        )

    def move(self, port: int) -> None:
        """Go on with another server."""
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        return httpx.get(self._url + path, timeout=60, trust_env=False).json()

    async def speak(self, name: str, messages: Messages) -> Reply | None:
        """Send an agent's turn, and count what becomes of it; None if it is refused."""
        client = Client(f"{self._url}/v1", headers={"x-agent-id": name})
        try:
            reply = await client.ask(messages, REPLY)
        except RuntimeError as refusal:
            words = str(refusal)
            status = words.partition(" answered ")[2][:3]
            self.outcomes[f"status {status}" if status.isdigit() else words[:200]] += 1
            return None
        except httpx.HTTPError as error:
            self.outcomes[f"{type(error).__name__}: {error}"] += 1
            return None
        self.outcomes["answered"] += 1
        self.talks[name] = continued(messages, reply, "And then?")
        return reply

    async def work(self, num_tokens: int) -> None:
        """Let all agents send long prompts and further turns at once."""

        async def one(name: str) -> None:
            messages = said(f"{name}: {TEXT * (num_tokens // TOKENS_PER_TEXT)}")
            for _ in range(NUM_TURNS):
                if await self.speak(name, messages):
                    messages = self.talks[name]

        await asyncio.gather(*(one(f"agent-{number}") for number in range(NUM_AGENTS)))

    async def crowd(self, context: int) -> None:
        """Send two prompts of nearly the whole context at once, and one that is too long."""
        large = int(LARGE_SHARE * context) // TOKENS_PER_TEXT
        too_large = int(TOO_LARGE_SHARE * context) // TOKENS_PER_TEXT
        texts = {f"large-{number}": TEXT * large for number in range(NUM_LARGE)}
        texts["too-large"] = TEXT * too_large
        turns = [self.speak(name, said(f"{name}: {text}")) for name, text in texts.items()]
        await asyncio.gather(*turns)

    async def again(self) -> None:
        """Let every agent that was answered send another turn, one after another."""
        for name, messages in dict(self.talks).items():
            if reply := await self.speak(name, messages):
                self.reused.append(reply.num_reused / max(reply.num_prompt, 1))


def measure_size(report: Report, model: Path, home: Path, size_mb: int) -> None:
    """Serve with so much device memory, fill it, and start again."""
    options, title = report.options, f"{size_mb} MB"
    arguments = ["--model", str(model), "--backend", "mlx", "--home", str(home)]
    arguments += ["--memory-budget-mb", str(options.memory_mb)]
    settings = {"device_memory_mb": str(size_mb), "max_batch_size": "16"}
    settings |= {"disk_budget_mb": "40000", "write_queue_mb": "8192", "shutdown_timeout_s": "60"}
    started = time.perf_counter()
    with serving(*arguments, settings=settings) as port:
        report.add(f"{title}: start", time.perf_counter() - started, "s")
        crowd = Crowd(port)
        (context,) = (entry["max_model_len"] for entry in crowd.get("/v1/models")["data"][:1])
        report.add(f"{title}: context", context, "tokens")
        note_memory(report, port, f"of {title} at ready")
        asyncio.run(crowd.work(int(SHARE * context)))
        note_memory(report, port, f"of {title} with agents")
        asyncio.run(crowd.crowd(context))
        note_memory(report, port, f"of {title} with long prompts")
    report.add(f"{title}: failed", crowd.num_failed, "requests", most=0)
    for outcome, count in sorted(crowd.outcomes.items()):
        report.add(f"{title}: {outcome}", count, "requests")
    num_agents = len(crowd.talks)
    crowd.outcomes.clear()
    with serving(*arguments, settings=settings) as port:
        crowd.move(port)
        listed = {agent["id"] for agent in crowd.get("/v1/agents?limit=100")["data"]}
        report.add(f"{title}: agents lost", len(set(crowd.talks) - listed), "agents", most=0)
        asyncio.run(crowd.again())
    answered = crowd.outcomes["answered"]
    report.add(f"{title}: answered after a restart", answered, "agents", least=num_agents)
    report.add(f"{title}: reused by them, least", min(crowd.reused, default=0), least=0.9)


def measure(report: Report) -> None:
    """Measure every size with the chosen model."""
    options = report.options
    report.settings.update({name: str(value) for name, value in vars(options).items()})
    tokenizer = options.tokenizer.expanduser()
    with tempfile.TemporaryDirectory() as temporary:
        models = options.directory or Path(temporary) / "models"
        if options.bits:
            model = make_quantised(options.shape, options.bits, models, tokenizer)
        else:
            model = make_model(options.shape, models, tokenizer)
        for size_mb in options.sizes_mb:
            with contextlib.ExitStack() as stack:
                home = stack.enter_context(tempfile.TemporaryDirectory())
                if options.hold:
                    free = stack.enter_context(holding_all_but(size_mb * 2**20))
                    report.note(f"{size_mb} MB: {free / 2**20:.0f} MB of the device are free")
                try:
                    measure_size(report, model, Path(home), size_mb)
                except RuntimeError as error:
                    report.note(f"{size_mb} MB: {error}")
                    report.add(f"{size_mb} MB: servers that ran to the end", 0, "", least=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--bits", type=int, choices=(0, 4, 8), default=0, help="0: as it is")
    parser.add_argument("--sizes-mb", type=int, nargs="*", default=[80], help="of the device")
    parser.add_argument("--memory-mb", type=int, default=1024, help="memory_budget_mb")
    parser.add_argument(
        "--hold", action="store_true", help="take the rest of a CUDA device's memory meanwhile"
    )
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("~/.semantic/models/smollm2-135m-instruct")
    )
    parser.add_argument("--directory", type=Path, help="directory for models")


if __name__ == "__main__":
    sys.exit(run("small-devices", measure, add_options=add_options))
