"""Log lines as events with fields: pretty on a terminal, JSON elsewhere and in the log file.

Code logs through the standard library or structlog; both end up here.
"""

import logging
import logging.handlers
import sys
from pathlib import Path

import structlog

from semantic.domain.errors import InvalidRequestError

_FILE_BYTES = 10 * 2**20
_NUM_FILES = 5


def configure_logging(level: str, log_format: str, log_dir: Path) -> None:
    """Send all logs to stderr and to ``log_dir/server.log``; replaces earlier handlers.

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
        cache_logger_on_first_use=True,
    )
    is_pretty = log_format == "pretty" or (log_format == "auto" and sys.stderr.isatty())
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_formatter(shared, is_pretty=is_pretty))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        file = logging.handlers.RotatingFileHandler(
            log_dir / "server.log", maxBytes=_FILE_BYTES, backupCount=_NUM_FILES, encoding="utf-8"
        )
    except OSError as error:
        raise InvalidRequestError(
            f"cannot write logs to {log_dir}: {error.strerror}; choose another --home",
            param="home",
        ) from error
    file.setFormatter(_formatter(shared, is_pretty=False))
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(stream)
    root.addHandler(file)
    root.setLevel(level.upper())
    # uvicorn's own lines are said by the banner and by our access log.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


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
