"""What encryption at rest costs: blocks and turns, written and read, sealed and plain.

python -m benchmarks.bench_encryption
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.cipher import Cipher
from semantic.adapters.outbound.ledger.sqlite import SqliteLedger
from semantic.domain.agents import Turn
from semantic.domain.blocks import BlockName, BlockPart, pack_tokens, packed_block_name
from semantic.domain.chat import Message, Role, TextPart
from semantic.domain.events import Usage
from semantic.domain.spec import LayerKind
from semantic.ports.backend import HostBuffer, KVPayload
from semantic.ports.storage import PutTurn

_TOKENS = 256
_BLOCK_BYTES = 2**22  # 256 tokens of a small model, in 16 bits
_ROUNDS = 30
_TEXT = "All work and no play makes an agent dull. " * 100


def main() -> None:
    """Print milliseconds and ratios."""
    print(
        f"a block of {_TOKENS} tokens and {_BLOCK_BYTES // 2**20} MB; a turn of {len(_TEXT)} bytes"
    )
    print(f"{'':14}{'plain ms':>10}{'sealed ms':>11}{'ratio':>8}")
    measured = [_measure(cipher) for cipher in (None, Cipher(os.urandom(32)))]
    for name in measured[0]:
        plain, sealed = (times[name] for times in measured)
        print(f"{name:14}{plain:10.2f}{sealed:11.2f}{sealed / plain:8.2f}")


def _measure(cipher: Cipher | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        files = SafetensorsCache(Path(place), cipher=cipher)
        parts = [_part(index) for index in range(_ROUNDS)]
        payload = KVPayload(
            "bench",
            LayerKind.FULL,
            0,
            _TOKENS,
            (HostBuffer("kv", (_BLOCK_BYTES // 2,), "float16", os.urandom(_BLOCK_BYTES)),),
        )
        written: list[BlockPart] = []
        ledger = SqliteLedger(Path(place), cipher=cipher)
        ledger.load()
        times = {
            "write a block": _median(
                lambda i: written.append(files.write(parts[i], payload, is_synced=False))
            ),
            "read a block": _median(lambda i: files.read(written[i])),
            "write a turn": _median(
                lambda i: ledger.apply([PutTurn("local", _turn(i))], is_synced=False)
            ),
            "read a turn": _median(lambda i: ledger.turn("local", f"turn_{i}")),
        }
        ledger.close()
        return times


def _median(work: Callable[[int], object]) -> float:
    times = []
    for index in range(_ROUNDS):
        started = time.perf_counter()
        work(index)
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


def _part(index: int) -> BlockPart:
    root = BlockName(bytes(32))
    tokens = pack_tokens([index] * _TOKENS)
    return BlockPart(root, packed_block_name(root, tokens), root, LayerKind.FULL, 0, tokens, 0, 0.0)


def _turn(index: int) -> Turn:
    return Turn(
        id=f"turn_{index}",
        parent=None,
        agent_id="coder",
        messages=(Message(Role.USER, (TextPart(_TEXT),)),),
        tokens=tuple(range(1000)),
        num_tokens=1000,
        pointer=None,
        usage=Usage(1000, 10),
        created_at=0.0,
    )


if __name__ == "__main__":
    main()
