import pytest

from semantic.adapters.outbound.models.known import known_models, short_names, table_version
from semantic.domain.model_names import suggest

pytestmark = pytest.mark.unit

GB = 2**30


def test_the_table_is_sound() -> None:
    models = known_models()
    assert len({model.name for model in models}) == len(models)
    assert [model.parameters for model in models] == sorted(model.parameters for model in models)
    for model in models:
        assert 0 < model.active <= model.parameters
        bits = 8 * model.num_bytes / (model.parameters * 1e9)
        assert 4 <= bits <= 6.5, model.name  # four bits, scales, and embeddings in more bits
    assert short_names(is_four_bit=True)["qwen3-4b"] == "mlx-community/Qwen3-4B-4bit"
    assert short_names(is_four_bit=False)["qwen3-4b"] == "Qwen/Qwen3-4B"
    assert table_version() >= "2026"


@pytest.mark.parametrize(
    "memory,bandwidth,best",
    [
        (6 * GB, 20e9, "smollm3-3b"),  # larger ones fit, and are slow
        (12 * GB, 100e9, "qwen3-14b"),
        (30 * GB, 40e9, "qwen3-coder-30b"),  # few active parameters
        (64 * GB, 400e9, "qwen3-next-80b"),
        (24 * GB, None, "qwen3-coder-30b"),  # a GPU whose speed is not measured
        (GB // 4, 100e9, None),
        (64 * GB, 1e6, None),
    ],
)
def test_the_best_model_fits_and_is_fast_enough(
    memory: int, bandwidth: float | None, best: str | None
) -> None:
    found = suggest(known_models(), memory, bandwidth)
    assert [one.model.name for one in found if one.is_best] == ([best] if best else [])
    for one in found:
        assert one.fits == (one.model.memory_bytes <= memory)
        assert (one.tokens_per_s is None) == (bandwidth is None)


def test_speed_falls_with_the_weights_that_a_token_reads() -> None:
    speed = {one.model.name: one.tokens_per_s or 0 for one in suggest(known_models(), 0, 50e9)}
    assert speed["qwen3-8b"] < speed["gpt-oss-20b"] < speed["qwen3-1.7b"]
