"""Prepared images, their positions in a prompt, and the key ids that stand there.

A model computes features from an image and uses them instead of embeddings of tokens. The sequence
has a *key id* at each of these positions: an id outside every vocabulary, derived from the image's
digest. Everything that identifies content by token ids (names of blocks, prefixes, forks, the
ledger) therefore keeps different images apart without handling images.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

# Key ids have this bit set; no vocabulary reaches it.
IMAGE_ID = 2**31
_KEY_TAG = b"semantic.image.key.v1"
_DIGEST_TAG = b"semantic.image.v1"
_ID_BYTES = 4
_IDS_PER_HASH = hashlib.sha256().digest_size // _ID_BYTES


def is_image_id(token: int) -> bool:
    """Whether a token id is a key id, which stands for a part of an image."""
    return token >= IMAGE_ID


def image_ids(digest: bytes, count: int) -> tuple[int, ...]:
    """Return the key ids of an image's first `count` features: SHA-256 in counter mode."""
    stream = b"".join(
        hashlib.sha256(_KEY_TAG + digest + block.to_bytes(8, "little")).digest()
        for block in range(-(-count // _IDS_PER_HASH))
    )
    starts = range(0, count * _ID_BYTES, _ID_BYTES)
    return tuple(int.from_bytes(stream[i : i + _ID_BYTES], "little") | IMAGE_ID for i in starts)


def num_before_images(tokens: Sequence[int]) -> int:
    """Count the tokens before the first key id."""
    return next((i for i, token in enumerate(tokens) if is_image_id(token)), len(tokens))


@dataclass(frozen=True, slots=True)
class PixelBuffer:
    """An array that a model's vision tower takes as input, in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: bytes


def image_digest(fingerprint: str, pixels: Iterable[PixelBuffer], grid: Sequence[int]) -> bytes:
    """Return the digest of a prepared image: all that its features depend on besides the model.

    Args:
        fingerprint: `VisionPort.fingerprint`.
        pixels: `PreparedImage.pixels`.
        grid: `PreparedImage.grid`.
    """
    whole = hashlib.sha256(_DIGEST_TAG)
    for buffer in pixels:
        header = f"{buffer.name} {buffer.dtype} {buffer.shape}".encode()
        whole.update(hashlib.sha256(header).digest() + hashlib.sha256(buffer.data).digest())
    whole.update(hashlib.sha256(f"{tuple(grid)} {fingerprint}".encode()).digest())
    return whole.digest()


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image as one model sees it. Equal if its digest and tokens are.

    Attributes:
        digest: See `image_digest`; 32 bytes.
        tokens: Replace the template's image marker: the model's own markers, such as those of rows
            and columns, and a key id for each feature.
        pixels: Input of the vision tower.
        grid: Patches of the image, as the model counts them (frames, rows, columns); empty for a
            model whose positions do not depend on it.
        width: Of the image as the client sent it, in pixels.
        tenant: Who sent it. Backends keep features for each tenant: shared ones would leak through
            timing.
    """

    digest: bytes
    tokens: tuple[int, ...]
    pixels: tuple[PixelBuffer, ...]
    grid: tuple[int, ...]
    width: int
    height: int
    tenant: str = ""

    @cached_property
    def feature_offsets(self) -> tuple[int, ...]:
        """Indices in `tokens` of the key ids, in ascending order."""
        return tuple(i for i, token in enumerate(self.tokens) if is_image_id(token))

    @property
    def num_features(self) -> int:
        return len(self.feature_offsets)

    @property
    def nbytes(self) -> int:
        return sum(len(buffer.data) for buffer in self.pixels)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PreparedImage):
            return NotImplemented
        return (self.digest, self.tokens) == (other.digest, other.tokens)

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions of an image in a prompt, from its first to its last feature.

    The model's own markers may stand between the features, but not before or after them.
    """

    start: int
    end: int
    image: PreparedImage

    @classmethod
    def placed(cls, image: PreparedImage, position: int) -> "ImageSpan":
        """Return the span of an image whose `tokens` begin at `position`."""
        offsets = image.feature_offsets
        return cls(position + offsets[0], position + offsets[-1] + 1, image)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens at these positions."""
        offset = self.image.feature_offsets[0]
        return self.image.tokens[offset : offset + self.end - self.start]

    @property
    def feature_positions(self) -> tuple[int, ...]:
        """Positions in the prompt of the key ids: feature k belongs at the k-th of them."""
        offsets = self.image.feature_offsets
        return tuple(self.start + offset - offsets[0] for offset in offsets)

    def features_in(self, start: int, end: int) -> range:
        """Return which features stand at the positions ``[start, end)`` of the prompt."""
        positions = self.feature_positions
        return range(bisect_right(positions, start - 1), bisect_right(positions, end - 1))


def cut_before_image(num_tokens: int, spans: Iterable[ImageSpan]) -> int:
    """Return the largest number of tokens, up to `num_tokens`, that ends inside no image."""
    inside = (span.start for span in spans if span.start < num_tokens < span.end)
    return min(inside, default=num_tokens)


def whole_chunk_end(start: int, end: int, spans: Iterable[ImageSpan]) -> int:
    """Return where a chunk ends instead of `end` to split no image.

    Before the image, or after it if the chunk begins with it.
    """
    for span in spans:
        if span.start < end < span.end:
            return span.start if span.start > start else span.end
    return end


def spans_within(spans: Iterable[ImageSpan], start: int, end: int) -> tuple[ImageSpan, ...]:
    """Return the spans that overlap the positions ``[start, end)``."""
    return tuple(span for span in spans if span.start < end and start < span.end)
