"""Lets `python -m semantic` do what `semantic` does."""

from semantic.entrypoints.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
