"""Compares every type of model that a library has with the library itself: ``make zoo``.

Prints one line for each type. A run over all types of a library writes its section of
docs/models-zoo.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.checks import Verdict, ZooResult
from tests.zoo.page import counts, write_section
from tests.zoo.runs import LIBRARIES, run

PAGE = Path("docs/models-zoo.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 if a type is wrong."""
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
        results += found
    return int(any(result.verdict is Verdict.WRONG for result in results))


if __name__ == "__main__":
    sys.exit(main())
