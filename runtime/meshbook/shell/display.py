"""Results and `display()` on a rank: MIME bundles for the shell's sink, made fit to be sent."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from meshbook.formatting import format_bytes
from meshbook.shell.failures import cut_text

if TYPE_CHECKING:
    from meshbook.shell.ipython import RankIPython

MimeBundle: TypeAlias = dict[str, object]
"""A representation, or what there is to know of it, by MIME type."""

TEXT_PLAIN_MAX_CHARS = 100_000
"""Of a representation as plain text; what the notebook shows of more is of no use to anyone."""

BUNDLE_MAX_CHARS = 32 << 20
"""Of all representations together: it travels as one frame, whose size peers limit, and is stored in the notebook."""


class RankDisplayPublisher(DisplayPublisher):
    """Publishes what `display()` shows on a rank."""

    shell: RankIPython

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
        self.shell.show_data(data, metadata, transient, update=update)

    def clear_output(self, wait: bool = False) -> None:
        """The cell's output is shared with other ranks: it stays."""


class RankDisplayHook(DisplayHook):
    """What becomes of a cell's last expression."""

    shell: RankIPython

    def write_output_prompt(self) -> None:
        """The notebook labels results."""

    def compute_format_data(self, result: object) -> tuple[MimeBundle, MimeBundle]:
        """Raises: what a result raises that cannot be shown in any way; other ranks may wait in its representation."""
        with self.shell.formatting_result() as errors:
            data, metadata = super().compute_format_data(result)
        if not data and errors:
            self._is_active = False
            raise errors[-1]
        for error in errors:
            self.shell.print_error(error)
        return data, metadata

    def write_format_data(self, format_dict: MimeBundle, md_dict: MimeBundle | None = None) -> None:
        self.shell.show_data(format_dict, md_dict, is_result=True)

    def log_output(self, format_dict: object) -> None:
        """No history of outputs: it would hold all of them in memory."""

    def finish_displayhook(self) -> None:
        self._is_active = False


def sendable(data: Mapping[str, object]) -> MimeBundle:
    """The bundle with binary data in base64, as Jupyter has it, and plain text of a bounded length."""
    bundle = {mimetype: _sendable(mimetype, value) for mimetype, value in data.items()}
    size = sum(len(value) for value in bundle.values() if isinstance(value, str))
    if size > BUNDLE_MAX_CHARS:
        return {"text/plain": f"<{format_bytes(size)} is too much to display; write it to a file on the rank>"}
    return bundle


def _sendable(mimetype: str, value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if mimetype == "text/plain" and isinstance(value, str):
        return cut_text(value, TEXT_PLAIN_MAX_CHARS)
    return value
