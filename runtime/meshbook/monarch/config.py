"""Monarch's names for settings of the process: ``from meshbook.monarch.config import configure, configured``.

A module of its own because programs import it by this name, as they import ``monarch.config``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshbook.mesh.settings import clear_runtime_config, configure, get_global_config, get_runtime_config, restore

__all__ = ["clear_runtime_config", "configure", "configured", "get_global_config", "get_runtime_config"]


@contextlib.contextmanager
def configured(**overrides: object) -> Iterator[dict[str, object]]:
    """Apply settings, as `configure` does, inside the block only. Gives `get_global_config`."""
    before = get_runtime_config()
    try:
        configure(**overrides)
        yield get_global_config()
    finally:
        restore(before)
