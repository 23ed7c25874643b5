import json
from pathlib import Path

import pytest

from semantic.adapters.outbound.models.compute_choices import ComputeChoices, cpu_name
from semantic.domain.spec import Compute

pytestmark = pytest.mark.unit

MEASURED = Compute("cpu", "float32", 2, "PyTorch", "measured 1.2 times as fast as bfloat16")
BASIS = {"dtype": "auto", "device": "auto", "weights": "auto", "torch": "2.9.1", "cpu": "Xeon"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models" / "compute.json"


def test_a_choice_is_kept_across_starts(file: Path) -> None:
    assert ComputeChoices(file, BASIS).recall("model") is None
    ComputeChoices(file, BASIS).keep("model", MEASURED)
    assert ComputeChoices(file, BASIS).recall("model") == MEASURED
    assert json.loads(file.read_text())["models"]["model"]["compute"]["reason"] == MEASURED.reason


def test_each_model_has_its_own(file: Path) -> None:
    other = Compute("cpu", "bfloat16", 2, "PyTorch", "requested")
    ComputeChoices(file, BASIS).keep("model", MEASURED)
    ComputeChoices(file, BASIS).keep("other", other)
    assert ComputeChoices(file, BASIS).recall("model") == MEASURED
    assert ComputeChoices(file, BASIS).recall("other") == other


@pytest.mark.parametrize(
    "name, value", [("cpu", "EPYC"), ("torch", "2.10.0"), ("dtype", "bfloat16")]
)
def test_another_cpu_torch_or_setting_ends_it(file: Path, name: str, value: str) -> None:
    ComputeChoices(file, BASIS).keep("model", MEASURED)
    assert ComputeChoices(file, {**BASIS, name: value}).recall("model") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[" * 100_000,
        b"[]",
        b'{"version": 1, "models": {"model": 7}}',
        b'{"version": 1, "models": {"model": {"basis": {}, "compute": {}}}}',
        json.dumps({"version": 1, "models": {"model": {"basis": BASIS}}}).encode(),
        json.dumps(
            {"version": 1, "models": {"model": {"basis": BASIS, "compute": {"dtype": 3}}}}
        ).encode(),
        json.dumps(
            {"version": 1, "models": {"model": {"basis": BASIS, "compute": {"dtype": "bfloat16"}}}}
        ).encode(),
    ],
)
def test_a_damaged_file_is_decided_again_and_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    assert ComputeChoices(file, BASIS).recall("model") is None
    ComputeChoices(file, BASIS).keep("model", MEASURED)
    assert ComputeChoices(file, BASIS).recall("model") == MEASURED


def test_a_home_that_cannot_be_written_to_is_logged_and_stops_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.write_bytes(b"in the directory's place, which stops root too")
    ComputeChoices(file, BASIS).keep("model", MEASURED)
    assert ComputeChoices(file, BASIS).recall("model") is None
    assert f"cannot write {file}" in caplog.text


def test_a_cpu_is_named_by_what_its_kernels_depend_on(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    flags = "flags : fpu avx2 amx_bf16 md_clear\n"
    cpuinfo.write_text(
        f"processor : 0\nmodel name : Xeon 8481C\ncpu MHz : 2500.1\n{flags}"
        f"processor : 1\nmodel name : Xeon 8481C\ncpu MHz : 1300.7\n{flags}"
    )
    named = cpu_name(cpuinfo)
    assert "Xeon 8481C" in named
    assert "amx_bf16, avx2" in named
    assert "md_clear" not in named  # a new microcode changes no kernel
    cpuinfo.write_text(cpuinfo.read_text().replace("2500.1", "900.0"))
    assert cpu_name(cpuinfo) == named
    cpuinfo.write_text(cpuinfo.read_text().replace("amx_bf16", ""))
    assert cpu_name(cpuinfo) != named
    assert cpu_name(tmp_path / "missing")
