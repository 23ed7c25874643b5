"""Log lines as events with fields: pretty on a terminal, JSON elsewhere and in the log file.

Code logs through the standard library or structlog; both end up here.
"""

import logging
import logging.handlers
import sys
from dataclasses import dataclass
from pathlib import Path

import structlog

from semantic.domain.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class LogFiles:
    """Where logs are kept, and how many of them.

    Attributes:
        max_bytes: A file that would grow larger is put aside, and a new one begun.
        num_old: Files that were put aside and are kept; older ones are deleted.
    """

    directory: Path
    max_bytes: int = 10 * 2**20
    num_old: int = 5


def configure_logging(level: str, log_format: str, files: LogFiles) -> None:
    """Send all logs to stderr and to ``server.log``; replaces earlier handlers.

    Raises:
        InvalidRequestError: the directory cannot be written.
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
    # uvicorn's own lines are said by the banner and by our access log.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def set_log_level(level: str) -> None:
    """Log what is at least as grave from now on: debug, info, warning or error."""
    logging.getLogger().setLevel(level.upper())


def _formatter(
    shared: list[structlog.typing.Processor], *, is_pretty: bool
) -> structlog.stdlib.ProcessorFormatter:
    processors: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta
    ]
    if is_pretty:
        processors.append(structlog.dev.ConsoleRenderer())
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=processors)
