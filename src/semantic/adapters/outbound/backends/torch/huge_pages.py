"""Memory in pages of 2 MB, where Linux gives them (6.1 and later); elsewhere nothing happens.

Decoding streams through all weights, and with pages of 4 KB it waits for their addresses too.
"""

import ctypes
import sys

_PAGE = 1 << 21
_MADV_COLLAPSE = 25


def collapse(address: int, num_bytes: int) -> None:
    """Move memory into huge pages, with what shares their first and last; its content stays."""
    if sys.platform != "linux":
        return
    start = address // _PAGE * _PAGE
    end = -(-(address + num_bytes) // _PAGE) * _PAGE
    # A request: the kernel refuses pages with holes, or all of them if it is too old.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_MADV_COLLAPSE)
    )
