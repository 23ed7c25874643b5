"""Models sharded over two processes give the same text as in one."""

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest

from semantic.adapters.config.sources import load_settings
from semantic.adapters.outbound.backends.fake import FakeBackend
from semantic.adapters.outbound.backends.torch.backend import TorchBackend
from semantic.adapters.outbound.backends.torch.loading import TorchOptions
from semantic.adapters.outbound.backends.torch.shares import Share
from semantic.cluster.adapters.sharded import ShardedBackend, share_of
from semantic.cluster.entrypoints import shards
from semantic.cluster.entrypoints.shards import load_sharded
from semantic.domain.errors import DeviceLostError, InvalidRequestError
from semantic.domain.spec import Compute, ComputeHint
from semantic.ports.backend import ModelBackendPort, SequenceId, Step, Ticket
from tests.contract.conftest import make_mlx, require_mlx
from tests.contract.driver import begin, finish, prompt, restored, sampled, step
from tests.contract.mlx_models import write_mlx_model
from tests.contract.models import GetModel, TinyModel, family_config, write_model
from tests.contract.sharded import fake_in_ranks, in_threads

pytestmark = pytest.mark.contract

Library = Literal["torch", "mlx"]
_IDS = itertools.count()


def sharded(model: TinyModel, library: Library) -> ShardedBackend:
    """A model in two processes."""
    settings = load_settings({"shards": 2, "dtype": "float32", "threads": 1})
    return load_sharded(model.directory, model.spec, settings, library)


def require_two_devices() -> None:
    """Skip the test on a machine with one GPU: NCCL wants another for each process."""
    require_mlx()
    import mlx.core as mx

    if mx.cuda.is_available() and mx.device_count(mx.gpu) < 2:
        pytest.skip("needs two GPUs, one for each process")


@pytest.fixture(params=["torch-llama", "mlx-llama"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelBackendPort, ShardedBackend]]:
    """A model in one process, and in two."""
    library, _, family = request.param.partition("-")
    directory = tmp_path_factory.mktemp(request.param)
    if library == "mlx":
        require_two_devices()
        model = write_mlx_model(directory, family)
        whole = make_mlx(model)
    else:
        model = write_model(directory, family_config(family))
        whole = TorchBackend(model.directory, model.spec, TorchOptions(dtype="float32"))
    divided = sharded(model, cast("Library", library))
    yield whole, divided
    divided.shutdown()
    whole.shutdown()


@pytest.mark.slow
def test_two_processes_reply_as_one_until_one_is_killed(
    both: tuple[ModelBackendPort, ShardedBackend],
) -> None:
    check_texts(*both)
    check_shares(*both)
    check_kill(both[1])


@pytest.mark.slow
def test_all_ranks_take_the_dtype_that_was_chosen_before(tiny_model: GetModel) -> None:
    model = tiny_model("llama")
    settings = load_settings({"shards": 2, "dtype": "auto", "threads": 1})
    known = Compute("cpu", "bfloat16", 1, "PyTorch", "measured before")
    divided = load_sharded(model.directory, model.spec, settings, "torch", ComputeHint(known))
    try:
        assert divided.traits.kv_abi == "torch.v1.bfloat16.shards2"
        assert len(begin(divided, next(_IDS), prompt(12)).finish(4)) == 4
    finally:
        divided.shutdown()


def check_texts(whole: ModelBackendPort, divided: ShardedBackend) -> None:
    """Alone, together, forked, cut back, and restored from what the ranks saved."""
    prompts = [prompt(n, seed=n) for n in (5, 23, 40)]
    expected = [begin(whole, next(_IDS), tokens).finish() for tokens in prompts]
    together = [begin(divided, next(_IDS), tokens) for tokens in prompts]
    finish(together)
    assert [run.reply for run in together] == expected
    back = restored(together[1], next(_IDS))
    fork = begin(divided, next(_IDS), prompts[2])
    divided.close_sequence(fork.seq)
    assert divided.fork(together[2].seq, fork.seq, len(prompts[2]) - 1)
    fork.num_held = len(prompts[2]) - 1
    back.tokens = prompts[1]
    back.num_held = divided.truncate(back.seq, len(prompts[1]) - 1)
    finish([back, fork])
    assert [back.reply, fork.reply] == expected[1:]
    for run in (*together, back, fork):
        divided.close_sequence(run.seq)


def check_shares(whole: ModelBackendPort, divided: ShardedBackend) -> None:
    """Each process keeps its share."""
    assert divided.spec == whole.spec
    assert divided.bytes_for([300, 300]) == whole.bytes_for([300, 300])
    assert divided.traits.kv_abi == f"{whole.traits.kv_abi}.shards2"
    embedded = []
    for backend in (whole, divided):
        seq = SequenceId(next(_IDS))
        backend.open_sequence(seq, [])
        embedded.append(backend.embed(seq, 0, prompt(9)))
        backend.close_sequence(seq)
    assert embedded[1] == pytest.approx(embedded[0], abs=1e-4)


def check_kill(divided: ShardedBackend) -> None:
    """A killed rank ends the group with a sentence."""
    ranks = cast("shards._Ranks", divided._end.__self__)  # type: ignore[attr-defined]
    pids = [process.pid for process in ranks._processes]
    run = begin(divided, next(_IDS), prompt(9))
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(DeviceLostError, match="2 shards are lost: a shard process exited"):
        step(divided, run.chunk())
    with pytest.raises(DeviceLostError):
        divided.open_sequence(SequenceId(next(_IDS)), [])
    divided.close_sequence(run.seq)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class _Doubter(FakeBackend):
    """Verifies one draft token and no more."""

    def launch(self, step: Step) -> Ticket:
        chunks = (replace(chunk, draft=chunk.draft[:1]) for chunk in step.chunks)
        return super().launch(Step(tuple(chunks)))


def test_only_draft_tokens_that_every_rank_accepts_count() -> None:
    tokens = prompt(9)
    expected = begin(FakeBackend(), 0, tokens).finish()
    backend = in_threads([FakeBackend(), _Doubter()])
    run = begin(backend, 0, tokens)
    chunk = replace(run.chunk(), draft=tuple(expected[:4]))
    row = sampled(step(backend, chunk)[0])
    assert [accepted.token for accepted in row.accepted] == expected[:1]
    assert row.token == expected[1]
    run.tokens += expected[:2]
    run.num_held = len(tokens) + 1
    assert run.finish() == expected
    backend.shutdown()


def test_ranks_that_disagree_are_given_up() -> None:
    backend = fake_in_ranks(2)
    seq = SequenceId(0)
    backend._links[0].send(("open_sequence", (seq, ())))
    backend._links[0].recv()
    with pytest.raises(DeviceLostError, match="disagree"):
        backend.open_sequence(seq, [])


def test_what_cannot_be_divided_is_refused(tiny_model: GetModel) -> None:
    spec = tiny_model("llama").spec
    with pytest.raises(InvalidRequestError, match="llama cannot be split into 5 shards"):
        share_of(spec, 5)


def test_a_share_that_cannot_be_loaded_gives_the_reason(tiny_model: GetModel) -> None:
    model, options = tiny_model("gpt-oss"), TorchOptions("float32", share=Share(0, 2))
    with pytest.raises(InvalidRequestError, match="cannot shard gpt_oss: transformers"):
        TorchBackend(model.directory, share_of(model.spec, 2), options)


def test_what_a_process_cannot_load_is_reported(tiny_model: GetModel, tmp_path: Path) -> None:
    moved = replace(tiny_model("llama"), directory=tmp_path)
    with pytest.raises(InvalidRequestError, match=f"the model is not at {tmp_path} on"):
        sharded(moved, "torch")
