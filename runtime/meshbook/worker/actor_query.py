"""The query ``actors``: what the actors of a rank are doing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker


def actors(worker: Worker) -> list[dict[str, object]]:
    """As `meshbook.actor.runner.ActorRunner.state` tells it."""
    return worker.registry.states()
