"""Number formats that only some CPUs compute in."""

import pytest

from semantic.adapters.outbound.backends.torch import linear as torch_linear

HAS_BFLOAT16 = torch_linear.is_supported()
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no bfloat16")
