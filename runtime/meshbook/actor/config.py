"""How log records of actors look: ``[actor=<root>.<train.Learner learners>]`` stands before their text.

Without the rank, which a notebook and `logging_option` show anyhow: equal lines of several ranks are shown once. With
the rank it is the record's ``actor_prefix``.

A module of its own because programs for Monarch set it: ``from meshbook.actor import config``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from meshbook.actor.context import context

prefix_python_logs_with_actor = True
"""Whether it does; set it in the process of the actors."""


def name_actors_in_logs() -> None:
    """Have records of `logging` that actors of this process make carry their names. Idempotent."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, NamedRecords):
        logging.setLogRecordFactory(NamedRecords(make))


class NamedRecords:
    """Makes records as another factory does; those of an actor have `actor_prefix`, and begin with its name."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        actor = context().actor_instance
        if prefix_python_logs_with_actor and actor.mailbox:
            record.actor_prefix = f"[actor={actor}] "
            prefix = f"[actor={actor.shared_name}] "
            record.msg = f"{prefix.replace('%', '%%') if record.args else prefix}{record.msg}"
        return record
