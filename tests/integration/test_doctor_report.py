"""`semantic doctor --report`: a text to paste into an issue, with a self-test on a real server."""

import json
from pathlib import Path

import pytest

from semantic.entrypoints.cli.app import main
from semantic.entrypoints.cli.doctor import self_test

pytestmark = pytest.mark.integration

EXACT = ("batch of four", "fork", "after a restart", "a later turn after a restart")


def test_the_report_has_machine_checks_and_self_test(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = str(tmp_path / "home")
    assert main(["doctor", "--report", "--json", "--backend", "fake", "--home", home]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["machine"]["semantic"]
    assert {"Python", "memory", "disk"} <= {check["what"] for check in report["checks"]}
    outcomes = {outcome["what"]: outcome for outcome in report["self_test"]}
    assert [what for what in EXACT if not outcomes[what]["is_ok"]] == []
    assert {"start", "second start", "one stream"} <= set(outcomes)
    assert not list(tmp_path.rglob("*.safetensors"))  # its KV cache was elsewhere, and is gone


def test_a_server_that_does_not_start_is_in_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--backend", "torch", "--model", str(tmp_path / "none"), "--home", str(tmp_path)]
    assert main(["doctor", "--report", "--native", "off", *flags]) == 1
    shown = capfd.readouterr().out
    assert shown.startswith("```\n")
    assert "BAD  self-test: failed: the self-test's server ended before it was ready" in shown


def test_a_reply_that_differs_is_bad() -> None:
    one, other = (self_test.Measured(text, 1.0, 1.0, 5, 4, 3) for text in ("a", "b"))
    found = self_test._equal("fork", [one, one], [one, other])
    assert (found.is_ok, found.found) == (False, "1 of 2 replies equal; 8 of 10 tokens reused")
