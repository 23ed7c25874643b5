"""Mamba 2's recurrence as the CUDA build needs it, compared with the library's."""

import sys
import types
from typing import Any

import pytest

from semantic.adapters.outbound.backends.mlx import runtime

runtime.prepare(num_threads=1)
mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
recurrent = pytest.importorskip("semantic.adapters.outbound.backends.mlx.cuda.recurrent")

pytestmark = pytest.mark.unit

HEADS, DIM, SIZE = 4, 8, 16
LIMIT = (0.01, 0.5)


def arguments(num_rows: int, num_tokens: int, num_groups: int, *, has_state: bool) -> list[Any]:
    """Those of the library's function, in its order; B and C are slices, as in its models."""
    mx.random.seed(num_rows + 10 * num_tokens + num_groups)
    both = mx.random.normal((num_rows, num_tokens, 2 * num_groups * SIZE))
    b, c = (x.reshape(num_rows, num_tokens, num_groups, SIZE) for x in mx.split(both, 2, axis=-1))
    return [
        mx.random.normal((num_rows, num_tokens, HEADS, DIM)),
        mx.log(mx.arange(1, HEADS + 1)),
        *(b, c),
        mx.random.normal((HEADS,)),
        mx.random.normal((num_rows, num_tokens, HEADS)),
        mx.random.normal((HEADS,)),
        mx.random.normal((num_rows, HEADS, DIM, SIZE)) if has_state else None,
        LIMIT,
    ]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(
    "num_rows,num_tokens,has_state",
    [(1, 1, True), (5, 1, True), (1, 1, False), (1, 7, False), (1, 7, True), (1, 300, True)],
)
def test_it_computes_what_the_library_does(
    num_rows: int, num_tokens: int, has_state: bool, num_groups: int
) -> None:
    given = arguments(num_rows, num_tokens, num_groups, has_state=has_state)
    found = recurrent.update_state(*given)
    expected = runtime.import_library("mlx_lm.models.ssm").ssm_attn(*given)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4).item()


def test_outputs_keep_the_models_number_format() -> None:
    *given, limit = arguments(3, 1, 2, has_state=True)
    state = given.pop()
    narrow = [array.astype(mx.bfloat16) for array in given]
    found = recurrent.update_state(*narrow, state, limit)
    expected = runtime.import_library("mlx_lm.models.ssm").ssm_attn(*narrow, state, limit)
    assert [array.dtype for array in found] == [array.dtype for array in expected]
    assert mx.allclose(found[0], expected[0], rtol=0.05, atol=0.05).item()


def test_padded_rows_are_the_librarys() -> None:
    given = arguments(2, 3, 1, has_state=True)
    mask = mx.array([[False, True, True], [True, True, True]])
    found = recurrent.update_state(*given, mask=mask)
    expected = runtime.import_library("mlx_lm.models.ssm").ssm_attn(*given, mask=mask)
    assert all(map(mx.array_equal, found, expected))


def test_it_replaces_the_function_in_library_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = types.ModuleType("mlx_lm.models.some"), types.ModuleType("other")
    for module in (model, other):
        module.ssm_update = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    library = runtime.import_library("mlx_lm.models.ssm")
    monkeypatch.setattr(library, "ssm_update", library.ssm_update)
    recurrent.use_custom_recurrence()
    assert model.ssm_update is recurrent.update_state
    assert other.ssm_update is None
