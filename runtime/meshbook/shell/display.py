"""Results and `display()` on a rank, as MIME bundles that are fit to be sent; and plain bars of tqdm.

tqdm's bars for notebooks are widgets of their process, which no front end can reach from a rank. So ``tqdm.notebook``
gives plain bars there, and the notebook shows those of all ranks as one.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import base64
import sys
import uuid
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from meshbook.concurrency.patches import patch
from meshbook.formatting import format_bytes
from meshbook.shape.value_tables import describe_large, is_long
from meshbook.shell.failures import cut_text

if TYPE_CHECKING:
    from meshbook.shell.ipython import RankIPython

MimeBundle: TypeAlias = dict[str, object]
"""A representation, or its metadata, by MIME type."""

TEXT_PLAIN_MAX_CHARS = 100_000
"""The most plain text of one representation; a notebook with more of it helps no reader."""

BUNDLE_MAX_CHARS = 32 << 20
"""The most text of a bundle: it travels as one frame, whose size peers limit, and is stored in the notebook."""


class RankDisplayPublisher(DisplayPublisher):
    """The publisher of `display()` on a rank."""

    shell: RankIPython
    _slots: list[str] | None = None
    """The ids of the cell's displays on this rank, which later ones replace; None in a cell that clears nothing."""
    _next = 0

    def begin_cell(self, code: str) -> None:
        """Give the displays of a cell that clears its output places of their own."""
        self._slots, self._next = [] if "clear_output" in code else None, 0

    def publish(
        self,
        data: MimeBundle,
        metadata: MimeBundle | None = None,
        source: object = None,
        *,
        transient: MimeBundle | None = None,
        update: bool = False,
        **kwargs: object,
    ) -> None:
        if self._slots is not None and not update and "display_id" not in (transient or {}):
            update = self._next < len(self._slots)
            if not update:
                self._slots.append(uuid.uuid4().hex)
            transient = {**(transient or {}), "display_id": self._slots[self._next]}
            self._next += 1
        self.shell.show_data(data, metadata, transient, update, False)

    def clear_output(self, wait: bool = False) -> None:
        """Have the next displays of this rank replace those so far. The cell's text, which ranks share, stays."""
        for display_id in [] if wait else (self._slots or [])[: self._next]:
            self.shell.show_data({"text/plain": ""}, None, {"display_id": display_id}, True, False)
        self._slots, self._next = self._slots or [], 0


class RankDisplayHook(DisplayHook):
    """The hook that shows a cell's last expression."""

    shell: RankIPython

    def write_output_prompt(self) -> None:
        """Write no prompt: the notebook labels results."""

    def compute_format_data(self, result: object) -> tuple[MimeBundle, MimeBundle]:
        """Format a result. Raises: its error where it has no representation at all; other ranks may wait in one."""
        with self.shell.formatting_result() as errors:
            data, metadata = super().compute_format_data(result)
        if not data and errors:
            self._is_active = False
            raise errors[-1]
        for error in errors:
            self.shell.print_error(error)
        return data, metadata

    def write_format_data(self, format_dict: MimeBundle, md_dict: MimeBundle | None = None) -> None:
        self.shell.show_data(format_dict, md_dict, None, False, True)

    def log_output(self, format_dict: object) -> None:
        """Keep no history of outputs: it would hold all of them in memory."""

    def finish_displayhook(self) -> None:
        self._is_active = False


_ARRAYS = (
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),  # IPython prefers a subclass's own repr to a printer of its base
    ("torch.distributed.tensor", "DTensor"),
    ("numpy", "ndarray"),
)
_FRAMES = ("pandas", "DataFrame"), ("pandas.core.frame", "DataFrame"), ("polars.dataframe.frame", "DataFrame")


def describe_large_values(shell: RankIPython) -> None:
    """Have results and displays show large tensors, arrays and data frames in a line, also within containers."""
    formatters: Any = shell.display_formatter
    for module, name in (*_ARRAYS, *_FRAMES):
        formatters.formatters["text/plain"].for_type_by_name(module, name, _print_value)
    for module, name in _FRAMES:
        formatters.formatters["text/html"].for_type_by_name(
            module, name, lambda frame: None if is_long(frame) else frame._repr_html_()
        )


def _print_value(value: object, printer: Any, cycle: bool) -> None:
    """Write the value as IPython does."""
    for number, line in enumerate((describe_large(value) or repr(value)).splitlines()):
        if number:
            printer.break_()
        printer.text(line)


def sendable(data: Mapping[str, object]) -> MimeBundle:
    """Return the bundle with binary data in base64, as Jupyter has it, and plain text of a bounded length."""
    bundle: MimeBundle = {}
    for mimetype, value in data.items():
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode("ascii")
        elif mimetype == "text/plain" and isinstance(value, str):
            value = cut_text(value, TEXT_PLAIN_MAX_CHARS)
        bundle[mimetype] = value
    size = sum(len(value) for value in bundle.values() if isinstance(value, str))
    if size > BUNDLE_MAX_CHARS:
        return {"text/plain": f"<{format_bytes(size)} is too much to display; write it to a file on the rank>"}
    return bundle


_NAME = "tqdm.notebook"


def plain_progress_bars() -> None:
    """Have ``tqdm.notebook`` make plain bars in this process, now or once it is imported."""
    if (loaded := sys.modules.get(_NAME)) is not None:
        _make_plain(loaded)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """The finder of ``tqdm.notebook``, which removes itself once that is loaded: it is asked for every import."""

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
        """tqdm's plain bar, which takes and ignores ``display``."""

        def __init__(self, *args: object, display: bool = True, **options: object) -> None:
            super().__init__(*args, **options)

    PlainBar.__name__ = PlainBar.__qualname__ = "tqdm_notebook"
    for name in ("tqdm_notebook", "tqdm"):  # the module's `trange` makes a `tqdm_notebook`
        patch(module, name, PlainBar)
