"""Models that accept images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from semantic.adapters.outbound.backends.fake import IMAGE_TOKEN, FakeBackend, fake_spec
from semantic.adapters.outbound.backends.fake_vision import FakeVision, VisionKind
from semantic.domain.images.spans import PreparedImage
from semantic.ports.backend import ModelBackendPort
from semantic.ports.vision import VisionPort
from tests.contract.driver import prompt
from tests.contract.models import BLOCK_TOKENS, WINDOW
from tests.picture_prompts import fake_picture

SIZE = (128, 96)


@dataclass(frozen=True, slots=True)
class VisionSubject:
    """A model under contract.

    Attributes:
        make: A fresh backend.
        picture: Makes an image file of a width and height; the number decides about its pixels.
        cuts_anywhere: Whether state can be cut at any token outside an image.
    """

    make: Callable[[], ModelBackendPort]
    vision: VisionPort
    picture: Callable[[int, tuple[int, int]], bytes]
    cuts_anywhere: bool = True

    def prepare(self, seed: int, size: tuple[int, int] = SIZE) -> PreparedImage:
        return self.vision.prepare(self.picture(seed, size))


def text(num_tokens: int, seed: int = 0) -> list[int]:
    return prompt(num_tokens, seed)


def _fake(
    kind: VisionKind, *, window: int = 0, has_state: bool = False, depth: int = 0
) -> VisionSubject:
    spec = fake_spec(
        block_tokens=BLOCK_TOKENS, window=window, has_state=has_state, vocab_size=IMAGE_TOKEN + 1
    )
    return VisionSubject(
        lambda: FakeBackend(spec, pipeline_depth=1 if depth else 0, vision=kind),
        FakeVision(IMAGE_TOKEN),
        fake_picture,
        cuts_anywhere=not window and not has_state,
    )


# Factories by name: one is called when its first test runs.
VISION_SUBJECTS: Mapping[str, Callable[[], VisionSubject]] = {
    "fake": lambda: _fake(VisionKind.CAUSAL),
    "fake-pipelined": lambda: _fake(VisionKind.CAUSAL, depth=1),
    "fake-state": lambda: _fake(VisionKind.CAUSAL, has_state=True),
    "fake-whole": lambda: _fake(VisionKind.BIDIRECTIONAL),
    "fake-whole-window": lambda: _fake(VisionKind.BIDIRECTIONAL, window=WINDOW),
}
