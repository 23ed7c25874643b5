import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from semantic import __version__
from semantic.adapters.extras import missing_extra
from semantic.entrypoints.cli.app import app, main

pytestmark = pytest.mark.unit


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"semantic {__version__}\n"


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in (
        "--host", "--port", "--model", "--backend", "--home", "--cache-dir", "--log-level",
        "--config", "--allow-remote", "--durability", "--disk-budget-mb", "--memory-budget-mb",
    ):  # fmt: skip
        assert flag in text
    assert "default: 8000" in text


def test_commands_do_not_import_what_only_a_server_needs() -> None:
    """They respond sooner without."""
    code = (
        "import sys; import semantic.entrypoints.cli.app; "
        "print([name for name in ('fastapi', 'numpy', 'torch') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert found.stdout == "[]\n"


def test_the_documentation_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "running.md").read_text() + (docs / "security.md").read_text()
    actions = ("stats", "verify", "gc", "export-key")
    for command in (["serve"], *(["cache", action] for action in actions), ["keys", "add"]):
        assert main([*command, "--help"]) == 0
        flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
        assert {flag for flag in flags if f"`{flag}`" not in page} == set()


def test_the_documentation_names_every_command() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    commands = {
        one.name or getattr(one.callback, "__name__", "") for one in app.registered_commands
    }
    groups = {one.name for one in app.registered_groups}
    assert {name for name in commands | groups if f"`semantic {name}" not in page} == set()


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--port", "99999"], "port"),
        (["--port", "many"], "port"),
        (["--host", "0.0.0.0"], "--allow-remote"),  # noqa: S104
        (["--config", "gone.toml"], "gone.toml"),
        (["--cache-dir", ""], "cache_dir"),
        (["--kv-bits", "12"], "kv_bits"),
    ],
)
def test_a_wrong_value_is_a_one_line_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("semantic: ")
    assert words in message
    assert message.count("\n") == 1


def test_a_misspelled_variable_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SEMANTIC_CACHEDIR", "/elsewhere")
    assert main(["cache", "stats", "--home", str(tmp_path)]) == 2  # there is none
    first, _ = capsys.readouterr().err.splitlines()
    assert first.startswith("semantic: unknown setting SEMANTIC_CACHEDIR, ignored")
    assert first.endswith("did you mean SEMANTIC_CACHE_DIR?")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "semantic", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603


def test_a_port_in_use_is_a_one_line_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port, "--home", str(tmp_path), "--backend", "fake")
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("is_pipx", [False, True], ids=["pip", "pipx"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    is_pipx: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    if is_pipx:
        (tmp_path / "pipx_metadata.json").write_text("{}")
    pip = f"{sys.executable} -m pip install 'semantic-server[otel]'"
    pipx = "pipx inject semantic-server 'semantic-server[otel]'"
    expected = f"otel_endpoint needs a_package; install it with: {pipx if is_pipx else pip}"
    assert missing_extra("otel_endpoint", "a_package", "otel") == expected


def test_a_missing_backend_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = ["serve", "--home", str(tmp_path), "--model", str(tmp_path), "--port", "0"]
    code = (
        "import sys; sys.modules['torch'] = None; from semantic.entrypoints.cli.app import main; "
        f"sys.exit(main({[*arguments, '--backend', 'torch']}))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    assert result.returncode == 2
    assert "the torch backend needs torch" in result.stderr
    assert f"{sys.executable} -m pip install 'semantic-server[torch]'" in result.stderr
    assert "listening" not in result.stdout


@pytest.mark.parametrize("backend", ["torch", "fake"])
def test_a_model_that_is_nowhere_is_an_error_without_a_banner(tmp_path: Path, backend: str) -> None:
    given = ("--home", str(tmp_path), "--port", "0", "--backend", backend, "--model", "no such")
    result = run("serve", *given)
    assert result.returncode == 2
    assert "the model could not be loaded: there is no model 'no such'" in result.stderr
    assert "listening" not in result.stdout


def test_a_home_that_cannot_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run("serve", "--home", str(blocked), "--backend", "fake", "--port", "0")
    assert result.returncode == 2
    assert "--home" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "typed,offered",
    [("semantic agents l", ["ls", "log"]), ("semantic launch co", ["codex", "continue"])],
    ids=["commands", "clients"],
)
def test_the_shell_completes(
    typed: str,
    offered: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    for name, value in {"_SEMANTIC_COMPLETE": "complete_bash", **words}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == offered
