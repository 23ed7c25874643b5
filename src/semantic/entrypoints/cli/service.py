"""`semantic service`: run the server in the background and start it at login.

On Linux the server becomes a unit of the user's systemd, on macOS an agent of launchd. Neither
needs an administrator.
"""

import os
import plistlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Protocol

import typer

from semantic.adapters.config.settings import ENV_PREFIX
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.flags import Answer, AsJson, GivenSettings

UNIT: Final = "semantic.service"
LABEL: Final = "dev.semantic.server"
# Longer than a stop after SIGTERM, which has four phases of up to shutdown_timeout_s each.
STOP_S: Final = 30
# Of `semantic`: the settings or the model are at fault, and another start would fail as well.
_NO_RETRY = 2
_INSTALL = "`semantic service install` installs it"

service_app = typer.Typer(
    help="Run the server in the background, and start it at login.", no_args_is_help=True
)


class ServiceManager(Protocol):
    """What runs programs in the background on this system."""

    @property
    def path(self) -> Path:
        """The file that describes the service."""

    def text(self, command: Sequence[str], home: Path) -> str:
        """The content of that file."""

    def start(self) -> None:
        """Read the file, and start or restart the service."""

    def stop(self) -> None:
        """Stop the service, and do not start it again."""

    def state(self) -> str:
        """`running`, or another word of the manager."""


class SystemdUser:
    """systemd's manager of the user's services."""

    @property
    def path(self) -> Path:
        config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        return Path(config).expanduser() / "systemd" / "user" / UNIT

    def text(self, command: Sequence[str], home: Path) -> str:
        del home
        return f"""\
# Written by `semantic service install`, which replaces changes.
[Unit]
Description=Semantic, an inference server that keeps agents' KV cache

[Service]
Type=exec
WorkingDirectory=%h
ExecStart={" ".join(map(_quoted, command))}
ExecReload=/bin/kill -HUP $MAINPID
TimeoutStopSec={STOP_S}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={_NO_RETRY}
LimitNOFILE=65536
UMask=0077

[Install]
WantedBy=default.target
"""

    def start(self) -> None:
        self._call("daemon-reload")
        self._call("enable", UNIT)
        self._call("restart", UNIT)

    def stop(self) -> None:
        self._call("disable", "--now", UNIT)

    def state(self) -> str:
        state = self._call("show", "--property=ActiveState", "--value", UNIT).strip()
        return "running" if state == "active" else state

    def _call(self, *arguments: str) -> str:
        return _call("systemctl", "--user", *arguments)


class LaunchdAgent:
    """launchd's manager of the user's agents."""

    @property
    def path(self) -> Path:
        return Path("~/Library/LaunchAgents").expanduser() / f"{LABEL}.plist"

    def text(self, command: Sequence[str], home: Path) -> str:
        output = str(home / "service.log")
        job = {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": STOP_S,
            "ProcessType": "Interactive",
            "Umask": 0o077,
            "StandardOutPath": output,
            "StandardErrorPath": output,
        }
        return plistlib.dumps(job).decode()

    def start(self) -> None:
        if self.state() != "not loaded":
            self.stop()
        _call("launchctl", "bootstrap", self._domain, str(self.path))

    def stop(self) -> None:
        _call("launchctl", "bootout", f"{self._domain}/{LABEL}")

    def state(self) -> str:
        try:
            text = _call("launchctl", "print", f"{self._domain}/{LABEL}")
        except InvalidRequestError:
            return "not loaded"
        states = [line.partition("=")[2].strip() for line in text.splitlines() if "state =" in line]
        return states[0] if states else "unknown"

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"


def service_manager(platform: str = sys.platform) -> ServiceManager:
    """Choose the manager of a platform."""
    return LaunchdAgent() if platform == "darwin" else SystemdUser()


def install(
    given: GivenSettings,
    *,
    print_only: Annotated[
        bool, typer.Option("--print", help="print the file and change nothing")
    ] = False,
) -> Answer:
    """Start the server now and at every login, with these flags of `semantic serve`.

    Install it again to change the flags. The service does not see SEMANTIC_* variables of this
    shell: give flags, or a file with --config.
    """
    manager, home = service_manager(), given.settings.home_dir.absolute()
    arguments = given.arguments
    if "--home" not in arguments:
        arguments += ("--home", str(home))
    command = (sys.executable, "-m", "semantic", "serve", *arguments)
    text = manager.text(command, home)
    if print_only:
        return Answer({"file": str(manager.path), "content": text}, text)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    manager.path.parent.mkdir(parents=True, exist_ok=True)
    manager.path.write_text(text, "utf-8")
    manager.start()
    scheme = "https" if given.settings.tls_cert else "http"
    url = f"{scheme}://{given.settings.host}:{given.settings.port}"
    lines = [f"installed {manager.path}", f"serving on {url}; log: {home / 'logs'}"]
    if isinstance(manager, SystemdUser):
        lines.append("starts when you log in; to start it at boot: loginctl enable-linger")
    found = {"file": str(manager.path), "command": command, "url": url, "log": str(home / "logs")}
    return Answer(found, "\n".join(lines), note=_unseen_variables())


@service_app.command()
def status(*, as_json: AsJson = False) -> int:
    """Show whether the service is installed and runs; the exit status is 1 if it does not run."""
    manager = service_manager()
    is_installed = manager.path.is_file()
    state = manager.state() if is_installed else "not installed"
    shown = f"{state}: {manager.path}" if is_installed else f"not installed; {_INSTALL}"
    found = {"file": str(manager.path), "installed": is_installed, "state": state}
    return Answer(found, shown, status=int(state != "running")).print(as_json=as_json)


@service_app.command()
def uninstall(*, as_json: AsJson = False) -> int:
    """Stop the service and remove its file; agents, their KV cache and models stay."""
    manager = service_manager()
    if not manager.path.is_file():
        raise InvalidRequestError(f"the service is not installed: there is no {manager.path}")
    try:
        manager.stop()
    finally:
        manager.path.unlink()
    found = {"file": str(manager.path), "removed": True}
    return Answer(found, f"stopped and removed {manager.path}").print(as_json=as_json)


def _unseen_variables() -> str:
    names = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    names = [name for name in names if name not in ("SEMANTIC_HOME", "SEMANTIC_URL")]
    return f"the service does not see {', '.join(names)}; give flags instead" if names else ""


def _quoted(argument: str) -> str:
    """Quote an argument for ExecStart, which expands % and $."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    escaped = escaped.replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != argument or " " in argument else argument


def _call(*command: str) -> str:
    """Run the manager's command and return what it prints.

    Raises:
        InvalidRequestError: it is not installed, or it failed; with what it printed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - constant commands
    except FileNotFoundError as error:
        raise InvalidRequestError(
            f"this system has no {command[0]}. Run `semantic serve` under your own supervisor; "
            "`semantic service install --print` prints a file to start from"
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise InvalidRequestError(f"{' '.join(command)}: {said}")
    return done.stdout
