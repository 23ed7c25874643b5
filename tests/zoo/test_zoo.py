"""The ten types of models that people use most, on each backend; `make zoo` compares all types."""

import re
from pathlib import Path

import pytest

from tests.contract.conftest import require_mlx
from tests.zoo.checks import Verdict, ZooResult, check_type
from tests.zoo.page import write_section
from tests.zoo.torch_library import TorchZoo

pytestmark = pytest.mark.contract

PAGE = Path(__file__).parents[2] / "docs" / "models-zoo.md"
MOST_USED = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "mistral3",
    "glm4_moe_lite",
    "deepseek_v32",
)
# Those of the torch backend that the contract suite does not cover.
MOST_USED_ON_TORCH = (
    "qwen3_5",
    "mistral3",
    "glm4_moe_lite",
    "deepseek_v32",
    "llama4_text",
    "lfm2",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "mamba2",
)


@pytest.mark.parametrize("model_type", MOST_USED_ON_TORCH)
def test_torch_computes_what_transformers_computes(model_type: str) -> None:
    result = check_type(TorchZoo(), model_type)
    assert result.verdict is Verdict.EXACT, result.note


@pytest.mark.parametrize("model_type", MOST_USED)
def test_mlx_computes_what_mlx_lm_computes(model_type: str) -> None:
    require_mlx()
    from tests.zoo.mlx_library import MlxZoo

    result = check_type(MlxZoo(), model_type)
    assert result.verdict is Verdict.EXACT, result.note


def test_the_page_lists_every_type_of_mlx_lm() -> None:
    require_mlx()
    from tests.zoo.mlx_library import MlxZoo

    library, text = MlxZoo(), PAGE.read_text("utf-8")
    section = text.partition("<!-- mlx -->")[2].partition("<!-- end of mlx -->")[0]
    assert library.title in section, "the installed mlx-lm is another version: run make zoo"
    assert set(library.types()) <= {*re.findall(r"`([^`]+)`", section)}
    assert ", 0 wrong, " in section


def test_a_section_is_replaced_and_others_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Zoo\n<!-- a -->\nold\n<!-- end of a -->\n<!-- b -->\nkept\n<!-- end of b -->"
    )
    results = [
        ZooResult("llama", Verdict.EXACT, "full"),
        ZooResult("qwen3", Verdict.EXACT, "full"),
        ZooResult("odd", Verdict.REFUSED, "it is odd."),
    ]
    write_section(page, "a", "lib 1.0", results)
    text = page.read_text()
    assert "lib 1.0: 2 exact, 1 refused, 0 wrong, 0 not built." in text
    assert "| full | `llama`, `qwen3` |" in text
    assert "| `odd` | refused | it is odd. |" in text
    assert "old" not in text
    assert text.endswith("<!-- b -->\nkept\n<!-- end of b -->")
