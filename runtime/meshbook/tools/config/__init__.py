"""``from meshbook.tools.config import Workspace``: folders that hosts get copies of.

A module of its own because programs import it by this name, as they import ``monarch.tools.config``.
"""

from __future__ import annotations

from meshbook.workspace.folders import Workspace

__all__ = ["Workspace"]
