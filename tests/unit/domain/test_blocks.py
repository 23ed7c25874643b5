from typing import TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semantic.domain.blocks import BlockName, BlockNamespace, block_end, block_name

pytestmark = pytest.mark.unit

quick = settings(deadline=None)

NAMESPACE = BlockNamespace("model@1", "bf16", b"salt")
ROOT = NAMESPACE.root()

Chain: TypeAlias = tuple[tuple[int, ...], ...]
NameInputs: TypeAlias = tuple[str, str, bytes, Chain]

# Few values, so that equal and nearly equal inputs are drawn often.
few_runs = st.lists(st.sampled_from([0, 1, 256]), min_size=1, max_size=3).map(tuple)
name_inputs = st.tuples(
    st.text("ab", max_size=2),
    st.text("ab", max_size=2),
    st.sampled_from([b"", b"a", b"b", b"ab"]),
    st.lists(few_runs, max_size=3).map(tuple),
)


def name_of(inputs: NameInputs) -> BlockName:
    fingerprint, kv_format, salt, chain = inputs
    name = BlockNamespace(fingerprint, kv_format, salt).root()
    for tokens in chain:
        name = block_name(name, tokens)
    return name


# -- names ------------------------------------------------------------------------------------


@quick
@given(name_inputs, name_inputs)
@example(("ab", "c", b"", ()), ("a", "bc", b"", ()))
@example(("a", "b", b"c", ()), ("a", "bc", b"", ()))
@example(("a", "", b"", ()), ("", "a", b"", ()))
@example(("a", "b", b"", ((1, 2), (3,))), ("a", "b", b"", ((1,), (2, 3))))
@example(("a", "b", b"", ((1, 2),)), ("a", "b", b"", ((1,), (2,))))
@example(("a", "b", b"", ((1,),)), ("a", "b", b"", ((1, 0),)))
@example(("a", "b", b"", ((0x0201,),)), ("a", "b", b"", ((1, 2),)))
@example(("a", "b", b"", ()), ("a", "b", b"", ()))
def test_names_are_equal_if_and_only_if_inputs_are(one: NameInputs, other: NameInputs) -> None:
    assert (name_of(one) == name_of(other)) == (one == other)


def test_a_length_inside_a_field_does_not_imitate_two_fields() -> None:
    # A reader that skips the first length sees the fields `a` and `b`.
    forged = "a" + (1).to_bytes(8, "little").decode() + "b"

    assert BlockNamespace(forged, "").root() != BlockNamespace("a", "b").root()


def test_a_root_is_no_block() -> None:
    tokens = (1, 2, 3)
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    block = block_name(ROOT, tokens)

    assert BlockNamespace("", "", ROOT + packed).root() != block
    assert BlockNamespace("", "", packed).root() != block


def test_the_format_of_names_is_fixed() -> None:
    first = block_name(ROOT, (1, 2, 3))
    second = block_name(first, (2**32 - 1,))

    assert ROOT.hex() == "08341f878aa012293591f67ff2e8d3bff9e079034526a23b20d098e7a231f66e"
    assert first.hex() == "dc95f4c48094d4c5912cd84f747daba5ac37780f299675d592340af3025da6e6"
    assert second.hex() == "df7a58ed335c673780351a5d74b4ab782963e9de0e7c414463297ecf41d08f40"
    assert (
        BlockNamespace("model@1", "bf16").root().hex()
        == "c58190059bc386875de08c9336d1286622bade8b645d97a53930cb31142d8256"
    )


def test_a_name_is_a_digest_with_a_short_form() -> None:
    assert isinstance(ROOT, BlockName)
    assert isinstance(block_name(ROOT, (1,)), BlockName)
    assert len(block_name(ROOT, (1,))) == 32
    assert ROOT.short == "08341f878aa0"


@pytest.mark.parametrize(
    "tokens, said",
    [
        ((), "at least one token"),
        ((-1,), "token ids"),
        ((1, 2**32), "token ids"),
        ((2**200,), "token ids"),
    ],
)
def test_tokens_that_cannot_be_named(tokens: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        block_name(ROOT, tokens)


@pytest.mark.parametrize("parent", [b"", ROOT[:31], ROOT + b"\1\0\0\0"])
def test_a_parent_that_could_pass_for_tokens_is_refused(parent: bytes) -> None:
    with pytest.raises(ValueError, match=f"32 bytes, got {len(parent)}"):
        block_name(BlockName(parent), (1,))


# -- cutting tokens into blocks ---------------------------------------------------------------


def ranges_of(num_tokens: int, block_tokens: int, cuts: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    end = 0
    while end < num_tokens:
        start, end = end, min(block_end(end, block_tokens, cuts), num_tokens)
        ranges.append((start, end))
    return ranges


@quick
@given(st.integers(0, 60), st.integers(1, 12), st.lists(st.integers(-5, 70), max_size=8))
def test_blocks_end_at_every_boundary_and_when_they_are_full(
    num_tokens: int, block_tokens: int, boundaries: list[int]
) -> None:
    ranges = ranges_of(num_tokens, block_tokens, boundaries)

    assert all(0 < end - start <= block_tokens for start, end in ranges)
    wanted = {b for b in boundaries if 0 < b < num_tokens}
    assert wanted <= {end for _, end in ranges}
    # A cut has a reason: a boundary, a full block or the end.
    for start, end in ranges:
        assert end in wanted or end == num_tokens or end - start == block_tokens
