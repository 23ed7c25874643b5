"""Stores how each model was last computed on this machine, in a file in the home directory.

Block names include the dtype of the computation. A dtype that is measured at every start may change
with the machine's load, and each change makes all stored blocks unusable. The choice is therefore
kept until the settings, the CPU or the version of torch change.
"""

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from semantic.adapters.outbound.models.fingerprint import read_records, write_records
from semantic.domain.spec import Compute

_log = logging.getLogger(__name__)

_CPUINFO = Path("/proc/cpuinfo")
# CPU features that determine which kernels exist for a dtype.
_X86_FLAGS = "avx2 avx512f avx512_bf16 avx512_fp16 avx512_vnni avx_vnni amx_tile amx_bf16 amx_int8"
_ARM_FLAGS = "asimddp bf16 i8mm sve sve2"
_KERNEL_FLAGS = frozenset(f"{_X86_FLAGS} {_ARM_FLAGS}".split(" "))


class ComputeChoices:
    """The choices in one file; a damaged file counts as empty and is replaced."""

    def __init__(self, file: Path, basis: Mapping[str, str]) -> None:
        """Set the file without reading it; choices made under another `basis` are ignored."""
        self._file = file
        self._basis = dict(basis)

    def recall(self, fingerprint: str) -> Compute | None:
        record = read_records(self._file).get(fingerprint)
        if not isinstance(record, dict) or record.get("basis") != self._basis:
            return None
        kept = record.get("compute")
        kinds = {field.name: field.type for field in fields(Compute)}
        if not isinstance(kept, dict) or kept.keys() != kinds.keys():
            return None
        is_sound = all(isinstance(kept[name], kind) for name, kind in kinds.items())  # type: ignore[arg-type]  # the fields' types are classes
        return Compute(**kept) if is_sound else None

    def keep(self, fingerprint: str, compute: Compute) -> None:
        """Store the choice for a model; logs a warning if the file cannot be written."""
        record = {"basis": self._basis, "compute": asdict(compute)}
        records = {**read_records(self._file), fingerprint: record}
        if not write_records(self._file, records):
            _log.warning(
                "cannot write %s; the next start chooses the dtype again. Make the directory "
                "writable, or set dtype.",
                self._file,
            )


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """Describe this machine's CPU with the instruction sets that kernels depend on."""
    facts = _first_cpu(cpuinfo)
    model = facts.get("model name") or facts.get("CPU part") or platform.processor()
    known = sorted(_KERNEL_FLAGS & cpu_flags(cpuinfo))
    return f"{platform.machine()} {model}: {', '.join(known)}"


def cpu_flags(cpuinfo: Path = _CPUINFO) -> set[str]:
    """All instruction sets of this machine's CPU; empty if the system does not list them."""
    facts = _first_cpu(cpuinfo)
    return set((facts.get("flags") or facts.get("Features") or "").split())


def _first_cpu(cpuinfo: Path) -> dict[str, str]:
    try:
        text = cpuinfo.read_text("utf-8", "replace")
    except OSError:
        return {}
    facts: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts
