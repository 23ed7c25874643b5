"""Optional packages: how to install the extra that contains a missing one."""

import sys
from pathlib import Path

_DISTRIBUTION = "semantic-server"


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation, which pipx or pip made."""
    wanted = f"'{_DISTRIBUTION}[{extra}]'"
    if Path(sys.prefix, "pipx_metadata.json").is_file():
        return f"pipx inject {_DISTRIBUTION} {wanted}"
    return f"{sys.executable} -m pip install {wanted}"


def missing_extra(feature: str, package: str | None, extra: str) -> str:
    """Say that a feature needs a package, and how to install the extra that contains it."""
    return f"{feature} needs {package}; install it with: {install_command(extra)}"
