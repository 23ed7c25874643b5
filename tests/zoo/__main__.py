"""Compares every type of model that a library has with the library itself: ``make zoo``.

Prints one line for each type. A run over all types of a library writes its section of
docs/models-zoo.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.checks import Verdict, ZooLibrary, ZooResult
from tests.zoo.page import counts, write_section
from tests.zoo.runs import LIBRARIES, run

PAGE = Path("docs/models-zoo.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 if a type is wrong, or not built for an unknown reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--backend", choices=LIBRARIES, help="one backend; default: all")
    parser.add_argument("types", nargs="*", help="types of models; default: all")
    chosen = parser.parse_args(arguments)
    results: list[ZooResult] = []
    for name in [chosen.backend] if chosen.backend else LIBRARIES:
        library = LIBRARIES[name]()
        found = run(name, chosen.types or library.types())
        print(f"{library.title}: {counts(found)}")
        if not chosen.types:
            write_section(PAGE, name, library.title, found)
        for result in found:
            if hint := _hint(result, library):
                print(f"{name} {result.model_type}: {hint}")
        results += found
    return int(any(result.verdict.is_fault for result in results))


def _hint(result: ZooResult, library: ZooLibrary) -> str:
    """Say what to do about a result; empty if there is nothing to do."""
    match result.verdict:
        case Verdict.WRONG:
            return result.note
        case Verdict.NOT_BUILT:
            return f"add sizes, or to UNBUILDABLE why none can suit ({result.note})"
        case Verdict.EXACT | Verdict.REFUSED if result.model_type in library.unbuildable:
            return "it can be built now: remove it from UNBUILDABLE"
        case _:
            return ""


if __name__ == "__main__":
    sys.exit(main())
