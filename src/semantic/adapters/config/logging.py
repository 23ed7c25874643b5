"""Structured logging: readable lines on a terminal, JSON elsewhere and in the log file.

Both the standard library's loggers and structlog's use this configuration.
"""

import logging
import logging.handlers
import sys
from dataclasses import dataclass
from pathlib import Path

import structlog

from semantic.adapters.config.terminal import keep_colours, printable_line
from semantic.domain.errors import InvalidRequestError

_LINES = ("exception", "stack")  # fields that may span several lines
# Other traceback formats show local variables, which may hold prompts and keys.
_RENDERER = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)


@dataclass(frozen=True, slots=True)
class LogFiles:
    """Location of the log file; at `max_bytes` it is rotated, and `num_old` old files are kept."""

    directory: Path
    max_bytes: int = 10 * 2**20
    num_old: int = 5


def configure_logging(level: str, log_format: str, files: LogFiles) -> None:
    """Send all logs to stderr and to `server.log`; replaces earlier handlers.

    Raises:
        InvalidRequestError: the log directory cannot be written.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    is_pretty = log_format == "pretty" or (log_format == "auto" and sys.stderr.isatty())
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_formatter(shared, is_pretty=is_pretty))
    try:
        files.directory.mkdir(parents=True, exist_ok=True)
        file = logging.handlers.RotatingFileHandler(
            files.directory / "server.log",
            maxBytes=files.max_bytes,
            backupCount=files.num_old,
            encoding="utf-8",
        )
    except OSError as error:
        raise InvalidRequestError(
            f"cannot write logs to {files.directory}: {error.strerror}; choose another --home",
            param="home",
        ) from error
    file.setFormatter(_formatter(shared, is_pretty=False))
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(stream)
    root.addHandler(file)
    set_log_level(level)
    # The banner and the access log already say what uvicorn logs at level info.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def set_log_level(level: str) -> None:
    """Set the least severe level to log: debug, info, warning or error."""
    logging.getLogger().setLevel(level.upper())


def _formatter(
    shared: list[structlog.typing.Processor], *, is_pretty: bool
) -> structlog.stdlib.ProcessorFormatter:
    processors: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta
    ]
    if is_pretty:
        processors += [_printable_fields, _render_line]
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=processors)


def _printable_fields(
    _: object, __: str, fields: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Remove control characters and line breaks, so that fields cannot forge log lines."""
    return {
        name: printable_line(value) if isinstance(value, str) and name not in _LINES else value
        for name, value in fields.items()
    }


def _render_line(logger: object, name: str, fields: structlog.typing.EventDict) -> str:
    """Render an entry without control characters; further lines of a traceback are indented."""
    return keep_colours(_RENDERER(logger, name, fields)).replace("\n", "\n  ")
