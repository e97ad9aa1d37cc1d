"""What a cell is called: by the panel, and on a rank that it debugs.

The panel names a cell by the file that ipykernel would give its whole text, magic line included. A rank compiles it
under a short name made of the same hash: breakpoints can be set before the cell has run, and again for the same text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshbook.mesh.dap_client import Message

# mypy: disable-error-code="no-untyped-call"

_ON_RANK = re.compile(r"<cell @(\w+)>")


def panel_path(text: str) -> str:
    """The file that stands for a cell in the panel."""
    from ipykernel.compiler import get_file_name

    return str(get_file_name(text))


def rank_name(text: str) -> str:
    """The file name of the same cell on a rank."""
    return f"<cell @{Path(panel_path(text)).stem}>"


def panel_folder() -> str:
    """Where the panel's files lie."""
    from ipykernel.compiler import get_tmp_directory

    return str(get_tmp_directory())


def to_rank(message: Message) -> Message:
    """The message with the rank's names for cells."""
    folder = panel_folder() + os.sep

    def rename(path: str) -> str:
        return f"<cell @{Path(path).stem}>" if path.startswith(folder) else path

    return cast("Message", _with_paths(message, rename))


def to_panel(message: Message) -> Message:
    """The message with the panel's names for cells."""
    folder = panel_folder()

    def rename(path: str) -> str:
        return _ON_RANK.sub(lambda found: f"{folder}{os.sep}{found[1]}.py", path)

    return cast("Message", _with_paths(message, rename))


def _with_paths(value: object, rename: Callable[[str], str]) -> object:
    if isinstance(value, dict):
        return {
            key: rename(each) if key == "path" and isinstance(each, str) else _with_paths(each, rename)
            for key, each in value.items()
        }
    return [_with_paths(each, rename) for each in value] if isinstance(value, list) else value
