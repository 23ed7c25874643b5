import hashlib
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.domain.blocks import BlockName, BlockNamespace, block_end, block_name
from semantic.domain.images.spans import (
    IMAGE_ID,
    ImageSpan,
    PixelBuffer,
    PreparedImage,
    cut_before_image,
    image_digest,
    image_ids,
    is_image_id,
    num_before_images,
    spans_within,
)

pytestmark = pytest.mark.unit

DIGEST = hashlib.sha256(b"picture").digest()
ROW = 7  # the model's own marker before each row


def prepared(digest: bytes = DIGEST, rows: int = 2, columns: int = 3) -> PreparedImage:
    keys = iter(image_ids(digest, rows * columns))
    tokens = tuple(t for _ in range(rows) for t in (ROW, *(next(keys) for _ in range(columns))))
    return PreparedImage(digest, (*tokens, ROW), (), (1, rows, columns), 30, 20)


@given(st.binary(min_size=32, max_size=32), st.integers(0, 40), st.integers(0, 40))
@settings(deadline=None)
def test_key_ids_are_a_prefix_free_stream_outside_every_vocabulary(
    digest: bytes, fewer: int, more: int
) -> None:
    fewer, more = sorted((fewer, more))
    ids = image_ids(digest, more)

    assert len(ids) == more
    assert all(IMAGE_ID <= key < 2**32 and is_image_id(key) for key in ids)
    assert image_ids(digest, fewer) == ids[:fewer]


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
@settings(deadline=None)
def test_two_images_have_different_ids_from_the_first_hash_on(one: bytes, other: bytes) -> None:
    assert (image_ids(one, 9) == image_ids(other, 9)) == (one == other)


def test_key_ids_never_change() -> None:
    """Stored blocks are named by them."""
    assert image_ids(bytes(32), 9) == (
        3598523516,
        2777327495,
        2531748487,
        4082564380,
        2328833364,
        2490936990,
        3012015654,
        3454282155,
        2876460581,
    )


@pytest.mark.parametrize(
    "fingerprint, name, shape, dtype, data, grid",
    [
        ("other", "pixels", (2, 3), "u8", b"abcdef", (1, 1)),
        ("model", "mask", (2, 3), "u8", b"abcdef", (1, 1)),
        ("model", "pixels", (3, 2), "u8", b"abcdef", (1, 1)),
        ("model", "pixels", (2, 3), "i8", b"abcdef", (1, 1)),
        ("model", "pixels", (2, 3), "u8", b"abcdeg", (1, 1)),
        ("model", "pixels", (2, 3), "u8", b"abcdef", (1, 2)),
    ],
)
def test_everything_that_features_depend_on_is_in_the_digest(
    fingerprint: str,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    data: bytes,
    grid: tuple[int, ...],
) -> None:
    pixels = PixelBuffer("pixels", (2, 3), "u8", b"abcdef")

    digest = image_digest("model", [pixels], (1, 1))

    assert digest != image_digest(fingerprint, [PixelBuffer(name, shape, dtype, data)], grid)
    assert digest != image_digest("model", [pixels, pixels], (1, 1))
    assert digest == image_digest("model", [pixels], [1, 1])


def test_a_span_reaches_from_the_first_to_the_last_feature() -> None:
    image = prepared()

    span = ImageSpan.placed(image, 100)

    assert (span.start, span.end) == (101, 108)
    assert image.num_features == 6
    assert span.feature_positions == (101, 102, 103, 105, 106, 107)


def test_features_of_a_chunk_skip_the_models_own_markers() -> None:
    span = ImageSpan.placed(prepared(), 100)

    assert span.features_in(0, 101) == range(0)
    assert span.features_in(102, 106) == range(1, 4)
    assert span.features_in(0, 1000) == range(6)
    chunks = [span.features_in(start, start + 3) for start in range(99, 120, 3)]
    assert [k for chunk in chunks for k in chunk] == list(range(6))


def test_a_cut_falls_before_an_image_never_into_it() -> None:
    spans = [ImageSpan.placed(prepared(), 100), ImageSpan.placed(prepared(), 110)]

    cuts = {cut: cut_before_image(cut, spans) for cut in (50, 101, 102, 107, 108, 111, 112, 118)}

    assert cuts == {50: 50, 101: 101, 102: 101, 107: 101, 108: 108, 111: 111, 112: 111, 118: 118}
    assert spans_within(spans, 0, 101) == ()
    assert spans_within(spans, 107, 112) == tuple(spans)
    assert spans_within(spans, 108, 111) == ()


def test_tokens_before_images_are_counted() -> None:
    assert num_before_images([1, 2, *prepared().tokens]) == 3
    assert num_before_images([1, 2]) == 2


def test_prepared_images_are_equal_by_digest_and_tokens() -> None:
    assert prepared() == prepared()
    assert hash(prepared()) == hash(prepared())
    assert prepared() != prepared(hashlib.sha256(b"other").digest())
    assert prepared() != prepared(rows=3)


# -- names of blocks --------------------------------------------------------------------------

BLOCK_TOKENS = 4
PICTURES = tuple(prepared(hashlib.sha256(name).digest(), 3, 3) for name in (b"a", b"b"))
Piece: TypeAlias = PreparedImage | tuple[int, ...]
pieces: st.SearchStrategy[list[Piece]] = st.lists(
    st.sampled_from((*PICTURES, (1,), (2, 3), (1,) * 5)), max_size=5
)


def blocks_of(sequence: list[Piece]) -> dict[BlockName, list[object]]:
    """Whatever precedes the end of each of a sequence's blocks, by the block's name."""
    tokens: list[int] = []
    content: list[object] = []  # for each position a token, or an image and a feature of it
    ends: list[int] = []
    for piece in sequence:
        if isinstance(piece, PreparedImage):
            span = ImageSpan.placed(piece, len(tokens))
            ends += (span.start, span.end)
            named = enumerate(piece.tokens)
            content += [(piece.digest, at) if is_image_id(token) else token for at, token in named]
            tokens += piece.tokens
        else:
            content += piece
            tokens += piece
    found: dict[BlockName, list[object]] = {}
    name, start = BlockNamespace("m", "f").root(), 0
    while start < len(tokens):
        end = min(block_end(start, BLOCK_TOKENS, ends), len(tokens))
        name = block_name(name, tokens[start:end])
        found[name] = content[:end]
        start = end
    return found


@given(pieces, pieces)
@settings(deadline=None)
def test_equal_names_mean_the_same_text_and_images_at_the_same_positions(
    one: list[Piece], other: list[Piece]
) -> None:
    first, second = blocks_of(one), blocks_of(other)

    for name in first.keys() & second.keys():
        assert first[name] == second[name]
