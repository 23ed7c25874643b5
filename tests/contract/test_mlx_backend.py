"""The MLX backend alone: it computes the logits of Hugging Face, or refuses the model."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from semantic.adapters.outbound.backends.mlx import runtime
from semantic.domain.errors import InvalidRequestError
from semantic.domain.sampling import SamplingParams
from semantic.domain.spec import LayerKind, LayerSpec, ModelCacheSpec
from semantic.ports.backend import ModelBackendPort, Sampled, SequenceId, Step
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import (
    GREEDY,
    Run,
    begin,
    check_batch,
    check_logprobs,
    check_scores,
    finish,
    prompt,
    restored,
    sampled,
    step,
)
from tests.contract.mlx_models import ALL_FAMILIES, MLX_FAMILIES
from tests.contract.models import (
    SIZES,
    WINDOW,
    GetModel,
    TinyModel,
    library_logprobs,
    write_model,
)
from tests.contract.plain_kernels import PlainKernels

pytestmark = pytest.mark.contract

WARM = SamplingParams(temperature=0.9, seed=3)
PENALISED = SamplingParams(temperature=0, seed=0, repetition_penalty=1.8)
# More groups than the kernel of attention takes at once, some with rows of unlike length.
MANY_GROUPS = (3, 9, 300, 305, 600, 800, 1100, 1300)
WHOLE_LAYERS = ("llama", "qwen2", "qwen3")  # that our CUDA kernels run; not with windows


@pytest.fixture(autouse=True)
def _mlx() -> None:
    require_mlx()


@pytest.fixture
def llama(mlx_model: GetModel) -> Iterator[ModelBackendPort]:
    made = make_mlx(mlx_model("llama"))
    yield made
    made.shutdown()


# -- the device's memory ------------------------------------------------------------------------


def small_device(model: TinyModel, num_bytes: int) -> ModelBackendPort:
    from semantic.adapters.outbound.backends.mlx.backend import MlxBackend
    from semantic.adapters.outbound.backends.mlx.loading import MlxOptions

    options = MlxOptions(dtype="float32", device_bytes=num_bytes)
    return MlxBackend.from_directory(model.directory, model.spec, options)


def test_a_small_device_limits_sequences_and_its_memory_is_accounted_for(
    mlx_model: GetModel,
) -> None:
    made = small_device(mlx_model("llama"), 64 * 2**20)
    finish([begin(made, 0, prompt(40))], 3)
    memory, room, held = made.device_memory(), made.traits.kv_room, made.bytes_for([43])
    made.shutdown()
    assert memory is not None
    import mlx.core as mx

    is_gpu = mx.default_device() == mx.Device(mx.gpu)
    assert is_gpu or memory.total == 64 * 2**20  # a GPU reports all of its memory
    assert memory.weights > 0
    assert memory.sequences == held
    assert room == 56 * 2**20 - memory.weights
    assert memory.scratch == memory.used - memory.weights - memory.sequences - memory.cached


def test_a_model_that_leaves_no_room_on_the_device_is_refused(mlx_model: GetModel) -> None:
    with pytest.raises(InvalidRequestError, match=r"no room for .*fewer bits"):
        small_device(mlx_model("llama"), 2**17)


@pytest.mark.parametrize(
    "reason,words",
    [
        ("cudaMallocAsync(&data) failed: out of memory", "too little free memory .* smaller model"),
        ("an illegal memory access was encountered", "the GPU has failed. Restart"),
    ],
)
def test_why_a_device_cannot_load_a_model_is_said(
    mlx_model: GetModel, monkeypatch: pytest.MonkeyPatch, reason: str, words: str
) -> None:
    from semantic.adapters.outbound.backends.mlx.cuda import tuning

    def fail(*_: Any) -> str:
        raise RuntimeError(reason)

    monkeypatch.setattr(tuning, "tune", fail)
    with pytest.raises(InvalidRequestError, match=words):
        make_mlx(mlx_model("llama"))


# -- the same numbers ---------------------------------------------------------------------------


# Those written as Hugging Face reads them too; its DeepSeek and hybrids differ in rounding alone.
COMPARED = [family for family in ALL_FAMILIES if family != "gpt-oss"]


@pytest.mark.parametrize("family", COMPARED)
def test_logits_are_hugging_faces(mlx_model: GetModel, family: str) -> None:
    model = mlx_model(family)
    backend = make_mlx(model)
    tokens = prompt(min(60, backend.spec.max_context))
    expected = library_logprobs(model, tokens)
    check_logprobs(backend, tokens, expected, 5e-3)
    check_scores(backend, tokens, expected, 5e-3)
    backend.shutdown()


def test_the_recurrence_for_cuda_gives_hugging_faces_logits(
    mlx_model: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of all sizes, beside another sequence, batched and restored."""
    from semantic.adapters.outbound.backends.mlx.cuda.recurrent import update_state

    model = mlx_model("falcon-h1")
    library = runtime.import_library("mlx_lm.models.falcon_h1")
    monkeypatch.setattr(library, "ssm_update", update_state)
    backend, tokens = make_mlx(model), prompt(60)
    check_restored(backend)
    for seq in (0, 1):
        backend.close_sequence(SequenceId(seq))
    check_logprobs(backend, tokens, library_logprobs(model, tokens), 5e-3)
    backend.shutdown()


@pytest.mark.parametrize("family", sorted(set(ALL_FAMILIES) - set(MLX_FAMILIES)))
def test_families_that_differ_in_arithmetic_alone(mlx_model: GetModel, family: str) -> None:
    backend = make_mlx(mlx_model(family))
    check_restored(backend)
    backend.shutdown()


def check_restored(backend: ModelBackendPort) -> None:
    """Batched equals alone, and restored equals computed."""
    prompts = [prompt(n, seed=n) for n in (1, 9, 30)]
    alone = check_batch(backend, prompts)
    runs = [begin(backend, 100 + n, tokens) for n, tokens in enumerate(prompts)]
    finish(runs, 3)
    runs = [restored(run, 200 + n) for n, run in enumerate(runs)]
    finish(runs)
    assert [run.reply for run in runs] == alone


# -- a step ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, WARM, PENALISED, replace(GREEDY, top_logprobs=2)])
def test_a_step_ahead_gives_the_same_tokens(
    llama: ModelBackendPort, params: SamplingParams
) -> None:
    """The next step is launched with a token that was not collected yet."""
    straight = begin(llama, 0, prompt(11), params)
    expected = straight.finish(8)
    run, other = begin(llama, 1, prompt(11), params), begin(llama, 2, prompt(30, seed=1))
    chunk = run.chunk()
    flights = [llama.launch(Step((chunk, other.chunk(8))))]
    other.num_held += 8
    reply: list[int] = []
    while len(reply) < 8:
        run.num_held += chunk.num_tokens
        chunk = run.chunk_of_last()
        flights.append(llama.launch(Step((chunk,))))
        rows = llama.collect(flights.pop(0)).rows
        assert isinstance(rows[0], Sampled)
        reply.append(rows[0].token)
    assert reply == expected


def test_a_row_that_pauses_keeps_its_place(llama: ModelBackendPort) -> None:
    """As rows under a grammar do, which take part in every second step."""
    expected = [begin(llama, i, prompt(9 + i, seed=i)).finish(9) for i in range(3)]
    runs = [begin(llama, 10 + i, prompt(9 + i, seed=i)) for i in range(3)]
    finish(runs, 1)
    for turn in range(30):
        left = [run for run in runs if len(run.reply) < 9]
        active = [run for i, run in enumerate(left) if (turn + i) % 3]
        chunks = [run.chunk() for run in active]
        for run, chunk, row in zip(active, chunks, step(llama, *chunks), strict=True):
            run.take(chunk, row)
    assert [run.reply for run in runs] == expected


def test_growing_through_every_size(llama: ModelBackendPort) -> None:
    """Sequences outgrow their groups one by one, and meet again in the next."""
    check_batch(llama, [prompt(n, seed=n) for n in (250, 253, 505)], 12)


def test_what_cannot_be_batched_runs_alone(mlx_model: GetModel) -> None:
    backend: Any = make_mlx(mlx_model("gemma2"))
    assert backend._runner.batching.value == "one row"
    assert backend.spec.kinds == (LayerKind.FULL,)
    assert backend.spec.max_context == WINDOW
    one_group: Any = make_mlx(mlx_model("deepseek-v3"))
    assert one_group._runner.batching.value == "rows of similar length"


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_prompt_that_is_one_chunk_takes_one_pass(mlx_model: GetModel, family: str) -> None:
    backend: Any = make_mlx(mlx_model(family))
    model, passes = backend._runner._model, []

    def run(tokens: Any, cache: Any) -> Any:
        logits = model(tokens, cache=cache)
        passes.append((tokens.shape, logits.shape[1]))
        return logits

    backend._runner._model = run
    fresh = begin(backend, 0, prompt(10))
    sampled(*step(backend, fresh.chunk(10)))
    assert passes == [((1, 10), 1)]  # and logits of the last token alone


# -- weights ------------------------------------------------------------------------------------


def test_four_bit_models_load_as_they_are(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    plain = write_model(tmp_path / "plain", LlamaConfig(**sizes))
    import mlx.core as mx

    utils = runtime.import_library("mlx_lm.utils")
    model, config = utils.load_model(plain.directory)
    model, config = utils.quantize_model(model, config, group_size=32, bits=4)
    utils.save_model(tmp_path / "packed", model)
    utils.save_config(config, tmp_path / "packed" / "config.json")
    backend = make_mlx(TinyModel(tmp_path / "packed", plain.spec))
    tokens = prompt(12)
    run, neighbour = begin(backend, 0, tokens), begin(backend, 1, prompt(20, seed=1))
    finish([run, neighbour])
    expected = [int(model(mx.array([tokens]))[0, -1].argmax().item())]
    assert run.reply[:1] == expected
    assert restored(run, seq=2).finish(9)[:6] == run.reply
    size = (tmp_path / "packed" / "model.safetensors").stat().st_size
    assert size < (plain.directory / "model.safetensors").stat().st_size / 2


def test_bfloat16_is_restored_exactly(mlx_model: GetModel) -> None:
    backend = make_mlx(mlx_model("llama"), "bfloat16")
    assert backend.traits.kv_abi == "mlx.v1.bfloat16"
    run = begin(backend, 0, prompt(12))
    run.finish(3)
    ticket = backend.snapshot(run.seq, 0, 12, LayerKind.FULL)
    first = backend.payload(ticket)
    again = restored(run, seq=2)
    second = backend.payload(backend.snapshot(again.seq, 0, 12, LayerKind.FULL))
    assert [bytes(b.data) for b in second.buffers] == [bytes(b.data) for b in first.buffers]


@pytest.mark.parametrize(
    "family, lengths",
    [
        *((family, (5, 9, 30)) for family in ALL_FAMILIES),
        *((family, MANY_GROUPS) for family in ("llama", "qwen3", "gemma3")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} rows",
)
def test_tuned_layers_compute_the_same(
    mlx_model: GetModel, monkeypatch: pytest.MonkeyPatch, family: str, lengths: tuple[int, ...]
) -> None:
    """As on CUDA: layers with the same input are one, and a few rows have kernels of ours."""
    model, prompts = mlx_model(family), [prompt(n, seed=n) for n in lengths]
    plain = make_mlx(model)
    expected = [begin(plain, n, tokens).finish(4) for n, tokens in enumerate(prompts)]
    plain.shutdown()
    kernels = PlainKernels(monkeypatch)
    backend: Any = make_mlx(model)
    runs = [begin(backend, n, tokens) for n, tokens in enumerate(prompts)]
    finish(runs, 4)
    assert [run.reply for run in runs] == expected
    assert kernels.calls["multiply"]
    # Whole layers are ours where they are known, and rows attend together in many groups.
    assert bool(kernels.calls["keep_and_attend"]) == (family in WHOLE_LAYERS)
    if lengths is MANY_GROUPS:
        assert backend._runner.batching.value == "all rows"
        assert kernels.calls["attend"]
    backend.shutdown()


# -- models it cannot run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (LayerSpec(LayerKind.FULL, 2, 16, 16),) * 2,
        (LayerSpec(LayerKind.FULL, 2, 8, 8),),
        (LayerSpec(LayerKind.STATE, state_elements=4),) * 2,
    ],
)
def test_the_librarys_caches_tell_the_geometry(
    mlx_model: GetModel, layers: tuple[LayerSpec, ...]
) -> None:
    model = mlx_model("llama")
    planned = replace(model, spec=replace(model.spec, layers=layers))
    backend = make_mlx(planned)
    assert backend.spec == model.spec
    # KV cache that was written for the planned layers has another name.
    assert backend.traits.kv_abi == f"mlx.v1.float32{model.spec.layout_tag(planned.spec)}"
    assert backend.traits.kv_abi != "mlx.v1.float32"
    backend.shutdown()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_attention_heads": None}, "its config.json lacks num_attention_heads"),
        ({"intermediate_size": 40}, "its weights do not match its config.json"),
        ({"num_hidden_layers": 3}, "its weights do not match its config.json"),
        ({"rope_scaling": {"rope_type": "odd"}}, "mlx-lm cannot build or run it; the log has"),
    ],
)
def test_refusals_are_in_our_words(
    mlx_model: GetModel, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    shutil.copytree(mlx_model("llama").directory, tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    config = {name: value for name, value in config.items() if value is not None}
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidRequestError, match="cannot run llama") as refused:
        make_mlx(TinyModel(tmp_path / "copy", ModelCacheSpec.from_config(config)))
    assert said in refused.value.message
    assert refused.value.message.endswith("or another model.")


def test_a_model_the_library_does_not_know_is_refused(mlx_model: GetModel, tmp_path: Path) -> None:
    model = mlx_model("llama")
    shutil.copytree(model.directory, tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    config["model_type"] = "unheard_of"
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequestError, match="does not support model_type 'unheard_of'"):
        make_mlx(TinyModel(tmp_path / "copy", ModelCacheSpec.from_config(config)))


def test_cuda_is_refused_where_there_is_none() -> None:
    import mlx.core as mx

    if mx.cuda.is_available():
        pytest.skip("there is one")
    from semantic.adapters.outbound.backends.mlx.loading import choose_device

    with pytest.raises(InvalidRequestError, match="no CUDA device"):
        choose_device("cuda")


# -- memory and threads -------------------------------------------------------------------------


def test_unloading_returns_the_memory(mlx_model: GetModel) -> None:
    import mlx.core as mx

    model = mlx_model("llama")
    active: list[int] = []
    for _ in range(20):
        backend = make_mlx(model)
        run = begin(backend, 0, prompt(300))
        run.finish(2)
        loaded = mx.get_active_memory()
        backend.shutdown()
        del backend, run
        active.append(mx.get_active_memory())
        assert loaded > active[-1]
    print(f"active bytes after the 1st and the 20th unload: {active[0]}, {active[-1]}")  # noqa: T201
    assert active[-1] <= active[0]
    assert mx.get_cache_memory() == 0


def test_long_runs_stay_flat(llama: ModelBackendPort) -> None:
    import mlx.core as mx

    totals: list[int] = []
    for turn in range(4):
        for i in range(16):
            run = begin(llama, 100 * turn + i, prompt(20 + 15 * i, seed=i))
            run.finish(16)
            llama.close_sequence(run.seq)
        mx.synchronize()
        totals.append(mx.get_active_memory() + mx.get_cache_memory())
    print(f"bytes after every 256 steps: {totals}")  # noqa: T201
    assert totals[-1] <= 1.2 * totals[0]
    assert llama.memory() == 0


def test_a_worker_thread_runs_and_ends_cleanly(mlx_model: GetModel) -> None:
    model = mlx_model("llama")
    replies: list[list[int]] = []
    payloads: list[Any] = []

    def work() -> None:
        backend = make_mlx(model)
        run = begin(backend, 0, prompt(12))
        replies.append(run.finish())
        payloads.append(backend.payload(backend.snapshot(run.seq, 0, 12, LayerKind.FULL)))
        backend.shutdown()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert replies[0] == replies[1]
    assert [bytes(b.data) for b in payloads[0].buffers] == [
        bytes(b.data) for b in payloads[1].buffers
    ]


def test_a_fork_of_a_batched_sequence_is_independent(llama: ModelBackendPort) -> None:
    runs = [begin(llama, i, prompt(12, seed=i)) for i in range(3)]
    finish(runs, 2)
    held = runs[1].num_held
    assert llama.fork(runs[1].seq, SequenceId(9), held)
    tokens = [*runs[1].tokens[:held], 7]
    fork = Run(llama, SequenceId(9), tokens, len(tokens), num_held=held)
    finish([*runs, fork])
    fresh = begin(llama, 20, tokens)
    assert fork.reply == fresh.finish()
