"""Memory moved into huge pages."""

import ctypes
import mmap

import pytest

from semantic.adapters.outbound.backends.torch.cpu import collapse

pytestmark = pytest.mark.unit

SIZE = 5 << 20


def test_memory_keeps_its_content() -> None:
    """Also what lies around the range: other requests of this kind would clear it."""
    content = bytes(range(256)) * (SIZE // 256)
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE) as memory:
        memory[:] = content
        first = ctypes.c_char.from_buffer(memory)
        collapse(ctypes.addressof(first) + (1 << 20), 3 << 20)
        del first
        assert memory[:] == content


def test_memory_that_is_not_there_is_passed_over() -> None:
    collapse(0, SIZE)
