"""Layers on the custom CUDA kernels give the same tokens as computed fresh, whatever ran before.

The numbers have 16 bits, so that a token may fall either way; log-probabilities are compared.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from semantic.domain.spec import LayerKind
from semantic.ports.backend import Chunk, Draw, ModelBackendPort, SequenceId
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import GREEDY, prompt, sampled, step
from tests.contract.models import SIZES, write_model
from tests.contract.plain_kernels import PlainKernels

pytestmark = pytest.mark.contract

DRAW = Draw(replace(GREEDY, top_logprobs=5), 1)
FAMILIES = {"llama": (LlamaConfig, 64), "qwen3": (Qwen3Config, 128)}  # and head_dim
# How weights are quantised: bits, by name or of all, and the group or the format.
PACKED: dict[str, tuple[dict[str, int], int, str]] = {
    "4 bits": ({}, 64, "affine"),
    "8 bits": ({"": 8}, 32, "affine"),
    "mixed bits": ({"v_proj": 6, "down_proj": 6, "lm_head": 5}, 32, "affine"),
    "mxfp4": ({}, 32, "mxfp4"),
}
Given = tuple[str, str | None, str]  # a family, how its weights are packed, and the number format


class Watched:
    """A backend, and the log-probabilities that its rows last had.

    Attributes:
        is_slow: Whether prompts should be short: plain operations multiply by quantised weights.
            Attention to long sequences is that of other weights.
    """

    def __init__(self, backend: ModelBackendPort, *, is_slow: bool = False) -> None:
        self.backend, self.is_slow = backend, is_slow
        self.tops: dict[int, tuple[tuple[int, float], ...]] = {}

    def begin(self, seq: int, tokens: list[int]) -> None:
        """Compute a prompt at once, as the library does."""
        self.backend.open_sequence(SequenceId(seq), tokens)
        self.feed({seq: (0, tokens)})

    def start(self, num_prompt: int, num_more: int) -> dict[int, list[int]]:
        """A first sequence: a prompt, then one token a step. Returns its tokens."""
        runs = {0: prompt(num_prompt)}
        self.begin(0, runs[0])
        self.grow(runs, num_more)
        return runs

    def feed(self, chunks: dict[int, tuple[int, list[int]]]) -> None:
        """One step: by sequence, tokens and where they begin."""
        made = [Chunk(SequenceId(s), start, tuple(t), DRAW) for s, (start, t) in chunks.items()]
        for seq, row in zip(chunks, step(self.backend, *made), strict=True):
            logprob = sampled(row).logprob
            assert logprob is not None
            self.tops[seq] = logprob.top

    def grow(self, runs: dict[int, list[int]], num_tokens: int, seed: int = 9) -> None:
        """Give sequences, whose tokens are these, one token a step."""
        for n in range(num_tokens):
            news = {s: prompt(num_tokens, seed + s)[n] for s in runs}
            self.feed({s: (len(runs[s]), [new]) for s, new in news.items()})
            for s, new in news.items():
                runs[s].append(new)

    def check(self, runs: dict[int, list[int]]) -> None:
        """Each sequence is where its tokens lead when they are computed at once."""
        for seq, tokens in runs.items():
            self.begin(10_000 + seq, tokens)
            expected = dict(self.tops[10_000 + seq])
            self.backend.close_sequence(SequenceId(10_000 + seq))
            for token, value in self.tops[seq][:3]:
                assert value == pytest.approx(expected.get(token, -99), abs=0.2), (seq, token)


def _config(family: str, *, is_real: bool, is_packed: bool) -> Any:
    """A model of the sizes that the kernels take; plain operations compute a smaller one."""
    kind, head_dim = FAMILIES[family]
    sizes = {**SIZES, "max_position_embeddings": 4096}
    if is_real:
        sizes |= {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
        sizes["head_dim"] = head_dim
    elif is_packed:
        sizes |= {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    return kind(**sizes)


def _quantise(directory: Path, bits: dict[str, int], group: int, mode: str) -> None:
    """Quantise a model's files as mlx-lm does."""
    import mlx.core as mx

    path = directory / "model.safetensors"
    tensors: dict[str, Any] = {}
    config = json.loads((directory / "config.json").read_text())
    packing: dict[str, Any] = {"group_size": group, "bits": bits.get("", 4), "mode": mode}
    for name, tensor in mx.load(str(path)).items():
        tensors[name] = tensor.astype(mx.bfloat16)
        owner = name.removesuffix(".weight")
        if tensor.ndim < 2:
            continue
        own = bits.get(owner.split(".")[-1], packing["bits"])
        wide = mx.quantize(tensors[name], group_size=group, bits=own, mode=mode)
        for suffix, array in zip(("weight", "scales", "biases"), wide, strict=False):
            tensors[f"{owner}.{suffix}"] = array
        packing[owner] = {"group_size": group, "bits": own, "mode": mode}
    mx.save_safetensors(str(path), tensors, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config | {"quantization": packing}))


@pytest.fixture(scope="module")
def loaded() -> Iterator[dict[Given, Any]]:
    """Backends by the parameters of `watched`: each model is loaded once."""
    made: dict[Given, Any] = {}
    yield made
    for backend in made.values():
        backend.shutdown()


@pytest.fixture(
    params=[
        *((family, None, "bfloat16") for family in FAMILIES),
        ("llama", None, "float16"),
        *(("llama", packed, "bfloat16") for packed in PACKED),
        ("qwen3", "4 bits", "float16"),
    ],
    ids=lambda given: " ".join(str(part) for part in given if part),
)
def watched(
    request: pytest.FixtureRequest,
    loaded: dict[Given, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Watched]:
    """The kernels where there is a GPU for them, else plain operations in their place."""
    require_mlx()
    from semantic.adapters.outbound.backends.mlx import loading
    from semantic.adapters.outbound.backends.mlx.cuda import device as cuda
    from semantic.adapters.outbound.backends.mlx.cuda import tuning

    family, packed, dtype = request.param
    is_real = cuda.is_available()
    if not is_real:
        PlainKernels(monkeypatch)
        monkeypatch.setattr(loading, "_is_expanded", lambda _: False)
        tune = tuning.tune
        monkeypatch.setattr(tuning, "tune", lambda model, _: tune(model, 2**30))
    else:
        import mlx.core as mx

        mx.enable_compile()  # as it is in a server
    if request.param not in loaded:
        model = write_model(tmp_path, _config(family, is_real=is_real, is_packed=bool(packed)))
        if packed is not None:
            _quantise(tmp_path, *PACKED[packed])
        loaded[request.param] = make_mlx(model, dtype if is_real else "float32")
    backend = loaded[request.param]
    assert _kinds(backend) == {"FewRowsBlock"}
    assert backend._runner.batching.value == "all rows"
    yield Watched(backend, is_slow=packed is not None and not is_real)
    for seq in [*backend._sequences]:
        backend.close_sequence(seq)
    assert backend.memory() == 0


def test_a_wrong_kernel_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with the library while the model loads, and `/health` says what is wrong."""
    require_mlx()
    from semantic.adapters.outbound.backends.mlx import loading

    kernels = PlainKernels(monkeypatch)
    kernels.error = 1.2
    monkeypatch.setattr(loading, "_is_expanded", lambda _: False)
    model = write_model(tmp_path, _config("llama", is_real=False, is_packed=True))
    _quantise(tmp_path, *PACKED["4 bits"])
    backend: Any = make_mlx(model, "float32")
    assert _kinds(backend) == {"TransformerBlock"}
    assert "MLX multiplies weights in 4 bits in groups of 64" in backend.traits.compute.slow
    kernels.calls.clear()
    watched = Watched(backend)
    watched.check(watched.start(30, 5))
    assert not kernels.calls["multiply_quantised"]
    backend.shutdown()


def test_rows_of_all_lengths(watched: Watched) -> None:
    """Alone, two and eight together, in more groups than a kernel takes, beyond a capacity."""
    lengths = (3, 251, 253) if watched.is_slow else (3, 251, 253, 300, 301, 505, 506, 700)
    runs = {n: prompt(n, seed=n) for n in lengths}
    for seq, tokens in runs.items():
        watched.begin(seq, tokens)
    for some in ([3], [3, lengths[-1]], [*runs]):
        part = {seq: runs[seq] for seq in some}
        watched.grow(part, 6)
        watched.check(part)


def test_short_prompts_beside_each_other(watched: Watched) -> None:
    """Tokens of one sequence look at each other; several sequences share a pass, or need two."""
    lengths = (3, 20, 30, 31, 250) if watched.is_slow else (3, 250, 300, 301, 520)
    runs = {n: prompt(n, seed=n) for n in lengths}
    for seq, tokens in runs.items():
        watched.begin(seq, tokens)
    for counts in ((5, 1, 9, 2, 1), (30, 2, 1, 12, 31), (1, 1, 1, 1, 1), (32, 1, 1, 1, 1)):
        news = {s: prompt(n, seed=s + n) for s, n in zip(runs, counts, strict=True)}
        watched.feed({s: (len(runs[s]), new) for s, new in news.items()})
        for s, new in news.items():
            runs[s] += new
        watched.check(runs)
    watched.grow(runs, 3)
    watched.check(runs)


def test_forks_go_their_own_ways(watched: Watched) -> None:
    runs = watched.start(300, 3)
    assert watched.backend.fork(SequenceId(0), SequenceId(1), 303)
    assert watched.backend.fork(SequenceId(0), SequenceId(2), 290)
    runs |= {1: [*runs[0]], 2: runs[0][:290]}
    for seq, tokens in runs.items():  # each alone, when it could still share its arrays
        watched.grow({seq: tokens}, 5)
    watched.grow(runs, 5)
    watched.check(runs)


def test_a_fork_is_made_at_once(watched: Watched) -> None:
    """Its source is cut back and goes another way before the fork takes its first step."""
    runs = watched.start(30, 20)
    assert watched.backend.fork(SequenceId(0), SequenceId(1), 50)
    runs[1] = [*runs[0]]
    assert watched.backend.truncate(SequenceId(0), 29) == 29
    del runs[0][29:]
    watched.grow({0: runs[0]}, 10, seed=55)
    watched.grow({1: runs[1]}, 1)
    watched.check(runs)


def test_a_snapshot_is_unchanged_by_later_steps(watched: Watched) -> None:
    """A snapshot that is fetched after the sequence was cut back and went another way."""
    runs = watched.start(40, 10)
    backend = watched.backend
    kept = [*runs[0]]
    ticket = backend.snapshot(SequenceId(0), 0, 50, LayerKind.FULL)
    assert backend.truncate(SequenceId(0), 45) == 45
    del runs[0][45:]
    watched.grow(runs, 10, seed=77)
    watched.check(runs)
    backend.open_sequence(SequenceId(1), kept)
    backend.load(SequenceId(1), [backend.payload(ticket)], 50)
    restored = {1: kept}
    watched.grow(restored, 4)
    watched.check(restored)


def test_rows_that_pause(watched: Watched) -> None:
    runs = {n: prompt(100 + n, seed=n) for n in range(3)}
    for seq, tokens in runs.items():
        watched.begin(seq, tokens)
    for turn in range(9):
        watched.grow({s: t for s, t in runs.items() if (turn + s) % 3}, 1, seed=turn)
    watched.check(runs)


# -- which layers are ours ------------------------------------------------------------------------


def _load(directory: Path, config: Any, **overrides: Any) -> Any:
    """A backend in float32, whose config says something more."""
    model = write_model(directory, config)
    written = json.loads((directory / "config.json").read_text()) | overrides
    (directory / "config.json").write_text(json.dumps(written))
    return make_mlx(model)


def _kinds(backend: Any) -> set[str]:
    return {type(layer).__name__ for layer in backend._runner._model.layers}


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    "config,overrides",
    [
        (LlamaConfig(**SIZES, attention_bias=True), {}),
        (LlamaConfig(**SIZES, mlp_bias=True), {}),
        (LlamaConfig(**SIZES), {"rope_traditional": True}),
        (LlamaConfig(**SIZES), {"rope_scaling": DYNAMIC}),
    ],
    ids=["attention bias", "MLP bias", "other pairs are turned", "no positions by row"],
)
def test_layers_that_the_kernels_cannot_run_stay_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, overrides: dict[str, Any]
) -> None:
    require_mlx()
    kernels = PlainKernels(monkeypatch)
    backend = _load(tmp_path, config, **overrides)
    assert _kinds(backend) == {"TransformerBlock"}
    assert not kernels.calls["keep_and_attend"]


def test_norms_of_another_format_stay_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_mlx()
    import mlx.core as mx

    from semantic.adapters.outbound.backends.mlx.cuda.tuning import use_custom_layers

    PlainKernels(monkeypatch)
    model = _load(tmp_path, LlamaConfig(**SIZES))._runner._model
    assert use_custom_layers(model) == 0  # they are already
    layer = model.layers[0]
    layer.__class__ = type(layer).__bases__[0]
    layer.input_layernorm.weight = layer.input_layernorm.weight.astype(mx.bfloat16)
    assert use_custom_layers(model) == 0


def test_kernels_that_are_wrong_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is batched by the library's code then."""
    require_mlx()
    from semantic.adapters.outbound.backends.mlx.cuda import attention as cuda_attention

    PlainKernels(monkeypatch)
    keep_and_attend = cuda_attention.keep_and_attend
    monkeypatch.setattr(
        cuda_attention, "keep_and_attend", lambda *given: 3 * keep_and_attend(*given)
    )
    backend = _load(tmp_path, LlamaConfig(**SIZES))
    assert _kinds(backend) == {"TransformerBlock"}
    assert backend._runner.batching.value == "all rows"
    assert "custom kernels disagree on 2 layers" in caplog.text


def test_all_kernels_are_compiled_while_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_mlx()
    kernels = PlainKernels(monkeypatch)
    _load(tmp_path, LlamaConfig(**SIZES))
    assert set(kernels.row_counts) > {8, 16, 24, 32, 64}
    assert kernels.calls["keep"] > kernels.calls["keep_and_attend"]
