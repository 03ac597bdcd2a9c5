"""Logs: one JSON object per line on stderr, the same for our own lines and those of libraries.

Every line has `ts, level, msg, service` and whatever is bound to the context (`request_id`, `job_id`,
`epoch`, `group`, ...). Prompts, keys, secrets and the query strings of URLs (presigned links, webhook
targets) never appear: a filter removes them by the name of the field and by the look of the text, also from
tracebacks.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from farm.settings import Settings

REDACTED = "[redacted]"
_SECRET_NAMES = re.compile(
    r"prompt|secret|password|pepper|authorization|cookie|token|signature|api_key|x-api-key|presigned",
    re.IGNORECASE,
)
# Names that contain one of those words and are harmless.
_HARMLESS_NAMES = frozenset({"num_tokens", "max_tokens"})
_PATTERNS = (
    (re.compile(r"\b(mk_[a-z]{1,12}_[0-9A-Za-z]{8}_)[0-9A-Za-z]+"), rf"\1{REDACTED}"),
    (re.compile(r"\b(whsec_|whsk_)[A-Za-z0-9+/=_-]+"), rf"\1{REDACTED}"),
    (re.compile(r"\bBearer\s+[^\s\"']+", re.IGNORECASE), f"Bearer {REDACTED}"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@\"']+@", re.IGNORECASE), rf"\1{REDACTED}@"),
    (re.compile(r"(\bhttps?://[^\s?\"'<>]+)\?[^\s\"'<>]+", re.IGNORECASE), rf"\1?{REDACTED}"),
    # PostgreSQL shows the whole failing row there, prompt included.
    (re.compile(r"^(DETAIL:).*$", re.MULTILINE), rf"\1 {REDACTED}"),
)


def configure_logging(settings: Settings, *, service: str) -> None:
    """Send the logs of this process, and of its libraries, to stderr in the configured form.

    Args:
        settings: Level and format.
        service: Role of the process: api, worker, ticker, cli.
    """
    level = logging.getLevelNamesMapping()[settings.log.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        _add_service(service),
        structlog.processors.format_exc_info,
        redact,
    ]
    renderer = _renderer(settings.log.format)
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries tell about each request and each connection at info; that is ours to tell.
    root.setLevel(max(level, logging.WARNING))


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove what must never be in a log; a structlog processor."""
    return {name: _clean(name, value) for name, value in event.items()}


def clean_text(text: str) -> str:
    """Remove keys, secrets, passwords and query strings from a text."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _clean(name: str, value: Any) -> Any:
    if value is not None and name not in _HARMLESS_NAMES and _SECRET_NAMES.search(name):
        return REDACTED
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, MutableMapping):
        return {key: _clean(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean("", item) for item in value]
    return value


def _add_service(service: str) -> Processor:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**event, "service": service}

    return add


def _renderer(form: str) -> list[Processor]:
    if form == "console":
        return [structlog.dev.ConsoleRenderer(colors=False)]
    return [
        structlog.processors.EventRenamer("msg"),
        structlog.processors.JSONRenderer(default=lambda value: clean_text(repr(value))),
    ]
