"""Writes docs/models-zoo.md: a run over all types of a library replaces its section."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.checks import Verdict, ZooResult


def counts(results: Sequence[ZooResult]) -> str:
    """Return how many types have each verdict."""
    found = Counter(result.verdict for result in results)
    return ", ".join(f"{found[verdict]} {verdict.value}" for verdict in Verdict)


def write_section(page: Path, name: str, title: str, results: Sequence[ZooResult]) -> None:
    """Replace the part of the page between a library's marks."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = "\n".join([start, "", *_lines(title, results), "", end])
    text = page.read_text("utf-8")
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    page.write_text(pattern.sub(lambda _: section, text), "utf-8")


def _lines(title: str, results: Sequence[ZooResult]) -> list[str]:
    lines = [f"{title}: {counts(results)}."]
    kept: dict[str, list[str]] = {}
    for result in results:
        if result.verdict is Verdict.EXACT:
            kept.setdefault(result.note, []).append(f"`{result.model_type}`")
    lines += ["", "| layers keep | exact types |", "|---|---|"]
    lines += [f"| {note} | {', '.join(types)} |" for note, types in sorted(kept.items())]
    others = [result for result in results if result.verdict is not Verdict.EXACT]
    if others:
        lines += ["", "| type | verdict | reason |", "|---|---|---|"]
    lines += [f"| `{r.model_type}` | {r.verdict.value} | {r.note} |" for r in others]
    return lines
