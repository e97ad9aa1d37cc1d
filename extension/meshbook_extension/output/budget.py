"""The budget of one cell's output, and an exact account of the text beyond it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import PurePath

from meshbook.formatting import format_bytes, name_ranks
from meshbook_extension.output.line_merging import LinePiece

SHOWN_CHARACTERS = 200_000
"""The text of one cell that goes to the front end; fifty times this freezes JupyterLab for a minute."""
SHOWN_DISPLAY_CHARACTERS = 20_000_000
"""The same for plots and other rich output."""
LAST_LINES = 20
"""The last lines that are shown of a cell that printed more."""
LINE_CHARACTERS = 1000
"""The characters of each of them."""
KEPT_CHARACTERS = 4000
"""The text that is kept of each rank and stream, to have its last lines."""
LABEL_CHARACTERS = 6
"""The characters that a label adds to a line, about."""
NAMED_PATHS = 2


class Budget:
    """A budget that decides piece by piece, and counts text that it refuses but for the last lines."""

    def __init__(self, characters: int = SHOWN_CHARACTERS, display_characters: int = SHOWN_DISPLAY_CHARACTERS) -> None:
        self.exceeded = False
        self.displays_hidden = 0
        self.limit = characters
        self._characters = characters
        self._display_characters = display_characters
        self._last: deque[LinePiece] = deque()
        self._skipped: dict[tuple[int, str], str] = {}
        self._hidden_bytes: dict[int, int] = {}
        self._cut_bytes: dict[int, int] = {}
        self._cut_paths: dict[int, str] = {}
        self.lacks = ""
        """The reason why logs lack some of the text; empty if they have all."""
        self._reported: tuple[int, int] = (0, 0)

    def admit(self, piece: LinePiece) -> bool:
        """Whether a piece of text is shown now. Once one is not, none is."""
        self._characters -= len(piece.text) + LABEL_CHARACTERS
        self.exceeded = self.exceeded or self._characters < 0
        if not self.exceeded:
            return True
        self._last.append(piece)
        if len(self._last) > LAST_LINES:
            lost = self._last.popleft()
            self._hide(lost.text, lost.ranks)
        return False

    def skip(self, rank: int, stream: str, text: str) -> None:
        """Take text that will not be shown, unless it turns out to be the last; much cheaper than `admit`."""
        kept = self._skipped.get((rank, stream), "") + text
        cut = len(kept) - KEPT_CHARACTERS
        if cut > KEPT_CHARACTERS:
            cut = kept.find("\n", cut) + 1 or cut
            self._hide(kept[:cut], (rank,))
            kept = kept[cut:]
        self._skipped[rank, stream] = kept

    def has_skipped(self, rank: int) -> bool:
        """Whether text of a rank waits for `take_skipped`."""
        return any(skipped == rank for skipped, _ in self._skipped)

    def take_skipped(self) -> list[tuple[int, str, str]]:
        """Return the last of the skipped text, as (rank, stream, text)."""
        skipped, self._skipped = self._skipped, {}
        return [(rank, stream, text) for (rank, stream), text in skipped.items()]

    def admit_display(self, piece: LinePiece, characters: int) -> bool:
        """Whether rich output of this size is shown."""
        self._display_characters -= characters
        if self._display_characters >= 0:
            return True
        self.displays_hidden += len(piece.ranks)
        return False

    def cut(self, rank: int, size_bytes: int, log_path: str, lacks: str = "") -> None:
        """The host agent keeps ``size_bytes`` of this rank's output, in all, in the log only.

        lacks: why the log does not have all of it; empty if it has.
        """
        if size_bytes:
            self._cut_bytes[rank] = size_bytes
        self._cut_paths[rank] = log_path
        self.lacks = self.lacks or lacks

    @property
    def hidden_bytes(self) -> int:
        """The bytes that no front end has seen, in all."""
        return sum(self._hidden_bytes.values()) + sum(self._cut_bytes.values())

    @property
    def has_news(self) -> bool:
        """Whether there is something to report."""
        return bool(self._last or self._skipped) or (self.hidden_bytes, self.displays_hidden) != self._reported

    def report(self, log_paths: Mapping[int, str]) -> tuple[str, list[LinePiece]]:
        """Report the text and displays that are not shown.

        Returns: a text that ends with a newline, and the last lines, which come after it.
        """
        last = [self._shorten(piece) for piece in self._last]
        self._last.clear()
        self._reported = (self.hidden_bytes, self.displays_hidden)
        ranks = sorted({rank for counts in (self._hidden_bytes, self._cut_bytes) for rank in counts})
        note = ""
        if ranks:
            paths = [self._cut_paths.get(rank) or log_paths.get(rank, "") for rank in ranks]
            where = f"{name_paths([path for path in paths if path])}%mesh logs -n 1000"
            note = (
                f"not shown: {self.hidden_bytes:,} bytes of {name_ranks(ranks)}"
                f"{' (the last lines follow)' if last else ''}\n"
                + (f"  the logs lack some of it ({self.lacks}): {where}\n" if self.lacks else f"  all of it: {where}\n")
            )
        if self.displays_hidden:
            note += (
                f"not shown: {self.displays_hidden} plots or other rich outputs, after "
                f"{format_bytes(SHOWN_DISPLAY_CHARACTERS)} of them in one cell\n"
            )
        return note, last

    def _shorten(self, piece: LinePiece) -> LinePiece:
        extra = piece.text[LINE_CHARACTERS:].rstrip("\n")
        if not extra:
            return piece
        self._hide(extra, piece.ranks)
        return piece._replace(text=f"{piece.text[:LINE_CHARACTERS]}... {len(extra):,} more characters\n")

    def _hide(self, text: str, ranks: tuple[int, ...]) -> None:
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        for rank in ranks:
            self._hidden_bytes[rank] = self._hidden_bytes.get(rank, 0) + size


def name_paths(paths: list[str]) -> str:
    """Name some log files for people to open, followed by a separator for the command that shows all."""
    if not paths:
        return ""
    named = ", ".join(paths[:NAMED_PATHS])
    more = len(paths) - NAMED_PATHS
    return f"{named}{f' and {more} more in {PurePath(paths[0]).parent}' if more > 0 else ''}; or "
