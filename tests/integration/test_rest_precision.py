"""KV cache at rest: raw, 8 and 4 bits, restored and read on; windows, and not every token."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bench_memory import rest_of
from benchmarks.bench_quality import (
    Divergence,
    ListeningBackend,
    divergences,
    listening_backend,
    text_tokens,
)
from benchmarks.blocks import spec_of
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.format import KVCodec, KVFormat
from semantic.adapters.outbound.models.fingerprint import fingerprint
from semantic.adapters.outbound.models.tokenizer import HFTokenizer
from semantic.domain.blocks import BlockNamespace, BlockPart, block_name, pack_tokens
from semantic.domain.spec import LayerKind
from tests.contract.driver import begin
from tests.integration.test_starter_on_backends import RECORDED

pytestmark = pytest.mark.integration

NUM_READ = 24


@pytest.fixture(scope="module")
def backend(starter_model_dir: Path) -> Iterator[ListeningBackend]:
    made = listening_backend(starter_model_dir)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def precise(starter_model_dir: Path) -> Iterator[ListeningBackend]:
    """In bfloat16 its own rounding, in any step, tips the scales of a question or two."""
    made = listening_backend(starter_model_dir, "float32")
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def found(backend: ListeningBackend, starter_model_dir: Path) -> dict[str, Divergence]:
    (found,) = divergences(backend, text_tokens(starter_model_dir, 513 + NUM_READ), 512)
    return found


def test_raw_state_changes_nothing(found: dict[str, Divergence]) -> None:
    assert found["raw"].kls == [0.0] * NUM_READ


def test_eight_bits_move_distributions_hardly(found: dict[str, Divergence]) -> None:
    assert 0 < found["q8g64"].mean < 0.02
    assert found["q8g64"].agreement >= 0.9


def test_four_bits_move_distributions_a_little(found: dict[str, Divergence]) -> None:
    assert found["q8g64"].mean < found["q4g64"].mean < 0.5
    assert found["q4g64"].agreement >= 0.7


@pytest.mark.parametrize("kv_format", ["raw", "q8g64"])
@pytest.mark.parametrize("question", RECORDED)
def test_greedy_text_after_a_rest_in_a_file(
    precise: ListeningBackend,
    starter_model_dir: Path,
    tmp_path: Path,
    question: str,
    kv_format: KVFormat,
) -> None:
    assert answer(precise, starter_model_dir, tmp_path, question, kv_format) == RECORDED[question]


def answer(
    backend: ListeningBackend, directory: Path, scratch: Path, question: str, kv_format: KVFormat
) -> str:
    """What the model says after its state of the prompt was in a file."""
    tokenizer = HFTokenizer(directory)
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))
    rested = prompt[:-1]
    root = BlockNamespace(fingerprint(directory, None), kv_format).root()
    part = BlockPart(root, block_name(root, rested), root, LayerKind.FULL, 0, pack_tokens(rested))
    source = begin(backend, 0, prompt)
    ((payload,),) = source.seal(len(rested))
    backend.close_sequence(source.seq)
    written = SafetensorsCache(scratch, KVCodec(kv_format)).write(part, payload, is_synced=False)
    assert (written.nbytes < payload.nbytes) == (kv_format != "raw")
    run = begin(backend, 1, prompt)
    run.load([(SafetensorsCache(scratch).read(written),)])
    text = run.say(tokenizer)
    backend.close_sequence(run.seq)
    return text


# -- window layers, by the geometry of Gemma 3 12B ----------------------------------------------


def test_what_rests_is_what_the_geometry_asks_for(tmp_path: Path) -> None:
    rest = rest_of(spec_of("Gemma 3 12B", scale=16), tmp_path, 8160, 32)
    assert rest.asked_for * 16 == 832 * 2**20
    assert rest.unsettled > 3.5 * rest.asked_for
    assert rest.asked_for <= rest.memory <= 1.1 * rest.asked_for
    assert rest.asked_for <= rest.disk <= 1.1 * rest.asked_for
    assert rest.num_restorable == 8192
