"""Entry point of the `semantic` command and of `python -m semantic`."""


def main() -> int:
    """Run the command; Ctrl-C ends it without a traceback, even during imports."""
    try:
        from semantic.entrypoints.cli import app  # noqa: PLC0415 - takes half a second
    except KeyboardInterrupt:
        return 130
    return app.main()


if __name__ == "__main__":
    raise SystemExit(main())
