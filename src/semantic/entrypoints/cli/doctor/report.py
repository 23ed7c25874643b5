"""The report of `doctor --report`: machine, versions, checks and self-test, to paste into an issue.

It has no prompts, keys, host name, user name or paths below the home directory.
"""

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from semantic import __version__
from semantic.entrypoints.cli.doctor.self_test import Outcome

_PACKAGES = ("torch", "mlx", "mlx-lm", "transformers", "tokenizers", "numpy", "llguidance")
_MARKS = {True: "ok  ", False: "BAD ", None: "    "}


def machine() -> dict[str, str]:
    """Return what the report says about machine and software."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "semantic": __version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "memory": f"{_memory_gb():.0f} GB, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "packages": ", ".join(_packages()),
    }


def report_text(
    about: dict[str, str], checks: Iterable[tuple[str, str, str]], outcomes: Sequence[Outcome]
) -> str:
    """Write the report; `checks` are level, name and finding."""
    lines = [f"{name:<10} {value}" for name, value in about.items()]
    lines += ["", "checks"]
    lines += [f"  {level:<5} {name}: {_without_home(found)}" for level, name, found in checks]
    lines += ["", "self-test"]
    lines += [f"  {_MARKS[one.is_ok]} {one.what}: {_without_home(one.found)}" for one in outcomes]
    return "\n".join(["```", *lines, "```"])


def _packages() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if named:
            return named[0].split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _without_home(text: str) -> str:
    return text.replace(str(Path.home()), "~")
