"""The ten types of models that people use most, on each backend; `make zoo` compares all types."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.contract.conftest import require_mlx
from tests.zoo.checks import Verdict, ZooModel, ZooResult, check_type
from tests.zoo.page import write_section
from tests.zoo.runs import LIBRARIES
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
    "mllama",
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


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_page_lists_every_type(name: str) -> None:
    if name == "mlx":
        require_mlx()
    library, text = LIBRARIES[name](), PAGE.read_text("utf-8")
    section = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
    assert library.title in section, "another version of the library is installed: run make zoo"
    assert set(library.types()) <= {*re.findall(r"`([^`]+)`", section)}
    assert set(library.unbuildable) <= set(library.types())
    assert ", 0 wrong, 0 not built." in section


class FailingZoo:
    """A `ZooLibrary` that cannot build its types, one of them for a known reason."""

    title = "lib 1.0"
    unbuildable: Mapping[str, str] = {"known": "it is no model"}

    def types(self) -> Sequence[str]:
        return ("known", "unknown")

    def write_model(self, model_type: str, directory: Path) -> ZooModel:
        raise ValueError(f"{model_type} does not fit into {directory.parent}")


def test_a_type_that_is_not_built_needs_a_reason() -> None:
    known, unknown = (check_type(FailingZoo(), name) for name in FailingZoo().types())
    assert known == ZooResult("known", Verdict.UNBUILDABLE, "it is no model")
    assert unknown.verdict is Verdict.NOT_BUILT
    assert unknown.note.startswith("ValueError: unknown does not fit")
    assert [result.verdict.is_fault for result in (known, unknown)] == [False, True]


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
    assert "lib 1.0: 2 exact, 1 refused, 0 cannot be built, 0 wrong, 0 not built." in text
    assert "| full | `llama`, `qwen3` |" in text
    assert "| `odd` | refused | it is odd. |" in text
    assert "old" not in text
    assert text.endswith("<!-- b -->\nkept\n<!-- end of b -->")
