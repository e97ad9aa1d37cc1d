"""How log records of actors look: ``[actor=<root>.<train.Learner learners{'gpus': 0/2}>]`` stands before their text.

Where they are written to stdout or stderr it is without the rank, which a notebook and `logging_option` show anyhow, so
that equal lines of several ranks are shown once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from meshbook.actor.context import context
from meshbook.concurrency.patches import patch


def name_actors_in_logs() -> None:
    """Have records of `logging` that actors of this process make carry their names. Idempotent."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, NamedRecords):
        logging.setLogRecordFactory(NamedRecords(make))
        patch(logging.StreamHandler, "format", _format)


class NamedRecords:
    """Makes records as another factory does; those of an actor have `actor_prefix`, and begin with it."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        actor = context().actor_instance
        if actor.mailbox:
            prefix = record.actor_prefix = f"[actor={actor}] "
            record.shown_prefix = f"[actor={actor.shared_name}] "
            record.msg = f"{prefix.replace('%', '%%') if record.args else prefix}{record.msg}"
        return record


def _format(handler: logging.StreamHandler[Any], record: logging.LogRecord) -> str:
    """`logging.Handler.format`, but without the rank on the streams that people see with it."""
    text = logging.Handler.format(handler, record)
    if (prefix := getattr(record, "actor_prefix", "")) and handler.stream in (sys.stdout, sys.stderr):
        text = text.replace(prefix, getattr(record, "shown_prefix", prefix))
    return text
