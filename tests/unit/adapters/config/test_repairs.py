"""The file of rules: what it may contain, and the errors that name what is wrong in it."""

import logging
from pathlib import Path

import pytest

from semantic.adapters.config.repairs import load_repairs
from semantic.domain.errors import InvalidRequestError
from semantic.domain.volatile.rules import CallingClient, RepairAction, RepairRule

pytestmark = pytest.mark.unit

OWN = """
[[rule]]
name = "own"
enabled = true
client = "claude-cli"
place = "system"
pattern = '^Session: \\S+$'
action = "freeze"
"""


def load(directory: Path, text: str) -> dict[str, RepairRule]:
    file = directory / "repairs.toml"
    file.write_text(text)
    return {rule.name: rule for rule in load_repairs(file)}


def test_the_shipped_rules_are_off() -> None:
    rules = load_repairs(None)
    assert len(rules) >= 4
    assert not any(rule.is_enabled for rule in rules)
    assert {rule.action for rule in rules} == set(RepairAction)


SHIPPED = [
    ("billing-header", "x-anthropic-billing-header: cc_version=2.1; cch=1f;", True),
    ("date-freeze", "Today's date is 2026-11-17.", True),
    ("date-freeze", "Date: 2026-11-17", True),
    ("date-freeze", "Update: 2026-11-17", False),
    ("date-freeze", " - Today's date: Tue Nov 17 2026", True),
    ("date-freeze", "The current date is 2026-11-17.", True),
    ("date-to-end", "Today is Tuesday.", True),
    ("date-to-end", "Update the code.", False),
    ("token-countdown", "Token usage: 35000/200000; 165000 remaining", True),
    ("session-path-to-end", "Scratchpad directory: /tmp/claude-0/x", True),
    ("session-path-to-end", "The directory is empty.", False),
]


@pytest.mark.parametrize("name, line, is_found", SHIPPED)
def test_the_shipped_rules_find_what_they_are_for(name: str, line: str, is_found: bool) -> None:
    (rule,) = (rule for rule in load_repairs(None) if rule.name == name)
    found = rule.find(f"You are a coder.\n{line}\nBe terse.")
    assert found == ([(17, 17 + len(line))] if is_found else [])


def test_the_shipped_rule_for_claude_code_finds_its_description() -> None:
    (rule,) = (rule for rule in load_repairs(None) if rule.name == "environment-to-start")
    assert rule.find("# Environment\nYou have been invoked in") == [(0, 13)]
    assert rule.find("You are a coder.\n# Environment\n") == []
    assert rule.is_for(CallingClient("claude-cli/2.1.328 (external, sdk-cli)", "anthropic"))
    assert not rule.is_for(CallingClient("anthropic-sdk", "anthropic"))


def test_a_file_switches_rules_on_and_adds_its_own(tmp_path: Path) -> None:
    rules = load(tmp_path, f'enable = ["date-freeze"]\n{OWN}')
    assert [name for name, rule in rules.items() if rule.is_enabled] == ["own", "date-freeze"]
    assert rules["own"].is_client("claude-cli/2.1.197 (external, cli)")
    assert not rules["own"].is_client("codex")


def test_a_rule_of_the_file_replaces_one_of_the_package(tmp_path: Path) -> None:
    rules = load(tmp_path, OWN.replace('"own"', '"date-freeze"'))
    assert rules["date-freeze"].find("Session: 1") == [(0, 10)]
    assert rules["date-freeze"].is_enabled


FAULTS = [
    ("enable = 1", "enable: "),
    ('enable = ["nothing"]', "enable: there is no rule 'nothing', only billing-header"),
    ("rule = 1", "rule: "),
    ("x = ", "it is not TOML"),
    ("y = 1", "y: unknown field"),
    (OWN + OWN, "two rules have the name 'own'"),
    (OWN.replace('"system"', '"tools"'), "rule own: place: only action"),
    (OWN.replace('"system"', '"everywhere"'), "rule own, place: "),
    (OWN.replace('"freeze"', '"delete"'), "rule own, action: "),
    (OWN.replace('"freeze"', '"sort_tools"'), "rule own: place: only action"),
    (OWN.replace("pattern", "regexp"), "rule own, regexp: unknown field"),
    (OWN.replace("^Session: \\S+$", "(Session"), "rule own, pattern: missing )"),
    (OWN.replace("^Session: \\S+$", ".*"), "rule own, pattern: it matches empty text"),
    (OWN.replace('"claude-cli"', '"["'), "rule own, client: "),
    (OWN.replace('name = "own"', ""), "rule number 1, name: "),
    (
        OWN.replace('"freeze"', '"move_to_end"').replace('"system"', '"user"'),
        'action = "move_to_end" needs place = "system"',
    ),
]


@pytest.mark.parametrize("text, words", FAULTS)
def test_a_fault_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        load(tmp_path, text)
    assert caught.value.message.startswith(f"repairs: {tmp_path / 'repairs.toml'}: ")
    assert words in caught.value.message
    assert caught.value.param == "repairs"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"none\.toml: it cannot be read"):
        load_repairs(tmp_path / "none.toml")


def test_a_pattern_that_takes_too_long_finds_nothing_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = OWN.replace("^Session: \\S+$", "(?:a|aa)+$")
    rule = load(tmp_path, slow)["own"]
    with caplog.at_level(logging.WARNING):
        assert rule.find("a" * 100 + "b") == ()
    assert "rule own not applied: its pattern takes more than 0.1 s" in caplog.text


def test_a_very_long_match_is_not_taken(tmp_path: Path) -> None:
    rule = load(tmp_path, OWN)["own"]
    assert rule.find(f"Session: {'x' * 5000}\nSession: y") == [(5010, 5020)]
