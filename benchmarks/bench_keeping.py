"""Cost of storing a turn: sealed in memory, written behind, encrypted; compared with no storage.

Measures a turn of the starter model in three modes, interleaved (at most 5 % more); then writing
and reading blocks and turns, plain and encrypted; then the speed of quantising and expanding
blocks.
"""

import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.blocks import STARTER, make_part, make_payload
from benchmarks.common import PersistentEngine, persistent_engine
from benchmarks.report import Report, Rounds, interleaved, run, seconds
from benchmarks.starter import backend, random_tokens, starter_directory
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.format import FORMATS, KVCodec, StoredBuffer
from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.application.settings import EngineLimits
from semantic.domain.agents import Turn
from semantic.domain.blocks import BlockPart
from semantic.domain.chat import Message, Role
from semantic.domain.events import Usage
from semantic.ports.storage import PutTurn

MOST = 1.05
_TEXT = "All work and no play makes an agent dull. " * 100


# -- whole turns ---------------------------------------------------------------------------------


def turn(made: PersistentEngine, tokens: list[int], reply: int) -> float:
    """Return the seconds of one turn, including its end."""
    job = made.job(tokens, reply)

    def compute() -> None:
        made.engine.submit(job)
        made.run()

    return seconds(compute)


def turns(num_tokens: int, num_reply: int, rounds: int) -> Rounds:
    """Return the seconds of a turn in each mode, interleaved."""
    directory = starter_directory()
    seeds = itertools.count(10**6)
    with ExitStack() as stack:
        device = stack.enter_context(backend(directory))
        working_mb = device.bytes_for([num_tokens + num_reply + 256]) // 2**20 + 1
        ways: dict[str, dict[str, object]] = {
            # There is room for the sequence alone, so that nothing can be kept.
            "not kept": {"durability": "none", "memory_budget_mb": working_mb},
            "in memory": {"durability": "none", "memory_budget_mb": 2000},
            "written behind": {"durability": "write_behind", "memory_budget_mb": 2000},
        }
        calls: dict[str, Callable[[], float]] = {}
        for name, settings in ways.items():
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            limits = EngineLimits(max_idle=0)
            engine = persistent_engine(device, directory, settings | {"cache_dir": cache}, limits)
            made = stack.enter_context(engine)
            calls[name] = lambda made=made: turn(  # type: ignore[misc]
                made, random_tokens(num_tokens, next(seeds)), num_reply
            )
        return interleaved(calls, rounds)


# -- encryption ----------------------------------------------------------------------------------


class Kept:
    """Blocks and turns in a directory; each call uses the next one."""

    def __init__(self, place: Path, cipher: Cipher | None) -> None:
        self._files = SafetensorsCache(place, cipher=cipher)
        self._ledger = SqliteLedger(place, cipher=cipher)
        self._ledger.load()
        self._payload = make_payload(STARTER, 0)
        self._indices = {name: itertools.count() for name in self.calls()}
        self._written: list[BlockPart] = []

    def calls(self) -> dict[str, Callable[[int], object]]:
        return {
            "write a block": self._write,
            "read a block": lambda i: self._files.read(self._written[i]),
            "write a turn": lambda i: self._ledger.apply(
                [PutTurn("local", _turn(i))], is_synced=False
            ),
            "read a turn": lambda i: self._ledger.turn("local", f"turn_{i}"),
        }

    def ms(self, name: str) -> float:
        call, index = self.calls()[name], next(self._indices[name])
        return 1000 * seconds(lambda: call(index))

    def _write(self, index: int) -> None:
        part = make_part(0, salt=index)
        self._written.append(self._files.write(part, self._payload, is_synced=False))

    def close(self) -> None:
        self._ledger.close()


def _turn(index: int) -> Turn:
    return Turn(
        id=f"turn_{index}",
        parent=None,
        agent_id="coder",
        messages=(Message.of(Role.USER, _TEXT),),
        tokens=tuple(range(1000)),
        num_tokens=1000,
        pointer=None,
        usage=Usage(1000, 10),
        created_at=0.0,
    )


def measure_encryption(report: Report, rounds: int) -> None:
    """Measure each call plain and encrypted, interleaved."""
    with ExitStack() as stack:
        kept = {}
        for form, cipher in (("plain", None), ("encrypted", Cipher(os.urandom(32)))):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            kept[form] = Kept(place, cipher)
            stack.callback(kept[form].close)
        for name in kept["plain"].calls():
            found = interleaved({form: partial(k.ms, name) for form, k in kept.items()}, rounds)
            report.add_rounds(found, "ms", f"{name}, ")
            report.add(f"{name}, encrypted / plain", found.ratios("encrypted", "plain"))


# -- resting formats -----------------------------------------------------------------------------


def expand(codec: KVCodec, resting: tuple[StoredBuffer, ...]) -> None:
    """Decode a block."""
    for buffer in resting:
        codec.decode(buffer)


def measure_codecs(report: Report, rounds: int) -> None:
    """Measure MB/s of quantising and expanding a 16-bit KV cache."""
    payload = make_payload(STARTER, 0)
    for bits in (8, 4):
        codec = KVCodec(FORMATS[bits])
        resting = codec.encode(payload)
        calls: dict[str, Callable[[], object]] = {
            "quantise": partial(codec.encode, payload),
            "expand": partial(expand, codec, resting),
        }
        speeds = {
            name: lambda call=call: payload.nbytes / seconds(call) / 1e6
            for name, call in calls.items()
        }
        report.add_rounds(interleaved(speeds, rounds), "MB/s", f"{bits} bits, ")
        kept = sum(memoryview(t.data).nbytes for buffer in resting for t in buffer.tensors)
        report.add(f"{bits} bits, bytes of 16-bit ones", kept / payload.nbytes)


def measure(report: Report) -> None:
    """Measure turns, encryption and codecs."""
    num_tokens, num_reply, rounds = report.choose((256, 16, 2), (2048, 48, 5))
    report.settings.update(tokens=num_tokens, reply=num_reply, rounds=rounds)
    found = turns(num_tokens, num_reply, rounds)
    report.add_rounds(found, "s", "turn, ")
    for name in ("in memory", "written behind"):
        ratios = found.ratios(name, "not kept")
        report.add(f"turn, {name} / not kept", ratios, most=MOST)
    measure_encryption(report, report.choose(5, 30))
    measure_codecs(report, rounds)


if __name__ == "__main__":
    sys.exit(run("keeping", measure))
