"""Number formats that only some CPUs support."""

import pytest

from semantic.adapters.outbound.backends.torch.cpu import has_bfloat16

HAS_BFLOAT16 = has_bfloat16()
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no bfloat16")
