import json
import logging
from pathlib import Path

import pytest
import structlog

from semantic.adapters.config.logging import LogFiles, configure_logging

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("own_logging")]


def test_json_lines_from_both_libraries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json", LogFiles(tmp_path / "logs"))
    structlog.get_logger("ours").info("sealed", blocks=3)
    logging.getLogger("theirs").warning("%d left", 2)
    logging.getLogger("theirs").debug("too quiet")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("sealed", "info"),
        ("2 left", "warning"),
    ]
    assert lines[0]["blocks"] == 3
    written = (tmp_path / "logs/server.log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in written] == ["sealed", "2 left"]


def test_an_exception_is_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json", LogFiles(tmp_path))
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("x").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "RuntimeError: boom" in json.loads(line)["exception"]


def test_pretty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug", "pretty", LogFiles(tmp_path))
    structlog.get_logger().debug("hello", answer=42)
    text = capsys.readouterr().err
    assert "hello" in text
    assert not text.startswith("{")


def test_pretty_lines_hold_no_commands_to_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("debug", "pretty", LogFiles(tmp_path))
    hostile = "a\x1b[2J\x9b2J\nfaked [info] line"
    secret = "a prompt, or a " + "key"
    structlog.get_logger("ours").info(hostile, model=hostile)
    logging.getLogger("theirs").warning("model %s", hostile)
    try:
        raise RuntimeError(hostile)
    except RuntimeError:
        logging.getLogger("theirs").exception("failed")
    written = capsys.readouterr().err
    assert "\x1b[2J" not in written
    assert "\x9b" not in written
    assert "\nfaked" not in written
    assert "\n  RuntimeError: a" in written
    assert secret not in written
    first, second, *_ = written.splitlines()
    assert first.count("faked") == 2
    assert second.count("faked") == 1


def test_files_are_rotated_and_the_oldest_deleted(tmp_path: Path) -> None:
    configure_logging("info", "json", LogFiles(tmp_path, max_bytes=300, num_old=2))
    for number in range(20):
        logging.getLogger("x").info("line %d of the log", number)
    names = ("server.log.2", "server.log.1", "server.log")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name).stat().st_size <= 300 for name in names)
    kept = [line for name in names for line in (tmp_path / name).read_text().splitlines()]
    numbers = [int(json.loads(line)["event"].split()[1]) for line in kept]
    assert numbers == list(range(20 - len(numbers), 20))
