"""tqdm on ranks: bars made for notebooks are widgets of their process, which no front end can reach from a rank.

So ``tqdm.notebook`` gives plain bars there, and the notebook shows those of all ranks as one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from meshbook.concurrency.patches import patch

_NAME = "tqdm.notebook"


def plain_progress_bars() -> None:
    """From now on, or when it is imported, ``tqdm.notebook`` makes plain bars in this process."""
    if (loaded := sys.modules.get(_NAME)) is not None:
        _make_plain(loaded)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Is asked for every module that is imported, so it goes when its own was loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _make_plain(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _make_plain(module: ModuleType) -> None:
    std: Any = sys.modules["tqdm.std"]

    class PlainBar(std.tqdm):  # type: ignore[misc]
        """tqdm's own, which knows no ``display``."""

        def __init__(self, *args: object, display: bool = True, **options: object) -> None:
            super().__init__(*args, **options)

    def plain_range(*args: int, **options: Any) -> PlainBar:
        return PlainBar(range(*args), **options)

    PlainBar.__name__ = PlainBar.__qualname__ = "tqdm_notebook"
    for name in ("tqdm_notebook", "tqdm"):
        patch(module, name, PlainBar)
    for name in ("tnrange", "trange"):
        patch(module, name, plain_range)
