"""Monarch's other name of it: ``from meshbook.tools.config.workspace import Workspace``.

A module of its own because programs import it by this name.
"""

from __future__ import annotations

from meshbook.workspace.folders import Workspace

__all__ = ["Workspace"]
