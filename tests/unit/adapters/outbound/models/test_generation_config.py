"""Sampling defaults from a model's directory."""

import json
import logging
from pathlib import Path

import pytest

from semantic.adapters.outbound.models.generation_config import read_generation_config
from semantic.domain.sampling import UNSET_SAMPLING, SamplingDefaults, SamplingParams

pytestmark = pytest.mark.unit


def read(directory: Path, content: str) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(content)
    return read_generation_config(directory)


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == SamplingDefaults()


def test_all_that_vllm_reads_is_read(tmp_path: Path) -> None:
    config = {
        "bos_token_id": 1,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 1,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 2048,
    }
    assert read(tmp_path, json.dumps(config)) == SamplingDefaults(0.6, 1.0, 20, 0.05, 1.1, 2048)


@pytest.mark.parametrize(
    "config,temperature",
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.7),
        ({"do_sample": True}, None),
        ({"do_sample": False, "temperature": "hot"}, 0.0),
    ],
)
def test_not_to_sample_is_greedy_unless_a_temperature_is_given(
    tmp_path: Path, config: dict[str, object], temperature: float | None
) -> None:
    assert read(tmp_path, json.dumps(config)).temperature == temperature


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1},
        {"temperature": True},
        {"temperature": "0.5"},
        {"temperature": 10**400},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": -3},
        {"min_p": [0.1]},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
    ],
)
def test_a_wrong_value_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, object]
) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path, json.dumps({**config, "eos_token_id": 2}))
    assert found == SamplingDefaults()
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in ("generation_config.json", *config))


@pytest.mark.parametrize("content", ["", "{", "[]", "1", "\udcff"])
def test_a_file_that_cannot_be_read_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (tmp_path / "generation_config.json").write_bytes(content.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert read_generation_config(tmp_path) == SamplingDefaults()
    assert "ignoring" in caplog.text


def test_minus_one_keeps_all_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, '{"top_k": -1}').top_k == 0


def test_what_a_request_gives_goes_before_the_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=5)
    asked = SamplingParams(temperature=1.0, unset=UNSET_SAMPLING - {"temperature"})
    assert asked.with_defaults(defaults) == SamplingParams(temperature=1.0, top_p=0.9, top_k=5)
    assert SamplingParams().with_defaults(defaults) == SamplingParams()
