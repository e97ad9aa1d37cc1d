"""The order of rich output: the first displays of all ranks become one grid, their second ones the next.

    rank 0   figure   text   figure          grid 1: figures of 0 and 1; their texts; grid 2
    rank 1      figure   text   figure

A grid waits up to `WAIT_S` for ranks that have not displayed anything yet, and the pieces behind it wait as well. Later
a rank still gets its place in a grid that is shown, which is drawn again, unless that rank has written something since,
which would stand below. A rank that displays alone is shown as any cell is, so its picture can be copied and saved. So
is output that no card can show, and nothing joins it.
"""

from __future__ import annotations

import base64
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeAlias

from meshbook.formatting import LINE, WARNING, group_ranks, themed
from meshbook_extension.output.labels import CODE_FONT, label, label_block
from meshbook_extension.output.line_merging import LinePiece
from meshbook_extension.output.publisher import CellSink, Content

WAIT_S = 0.3
"""The time that a grid waits for the other ranks."""
DRAW_S = 0.25
"""The least time between two drawings of one grid."""
CHARACTERS_PER_S = 500_000
"""The most that drawing a grid again sends; servers drop output above twice of that."""


@dataclass(eq=False)
class RankCard:
    """The rich output of a rank, or equal one of several."""

    ranks: tuple[int, ...]
    data: Content
    metadata: Content = field(default_factory=dict)
    display_id: str | None = None
    is_result: bool = False
    grid: DisplayGrid | None = None
    """The grid that has it, once it has a place."""
    is_shown: bool = False
    """Whether it is shown outside of grids."""
    draws_again_at: float = 0.0


class DisplayGrid:
    """The displays of one round, a card for each rank."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.cards: list[RankCard] = []
        self.id = uuid.uuid4().hex
        self.is_shown = self.began_alone = False
        self.draws_again_at = 0.0


Item: TypeAlias = "LinePiece | RankCard | DisplayGrid"


class DisplayRounds:
    """The pieces of one cell's output on their way, with their displays in grids."""

    def __init__(
        self, sink: CellSink, ranks: Collection[int], name: Callable[[Sequence[int]], str], *, joins: bool
    ) -> None:
        """name: names ranks by coordinates. joins: whether displays of several ranks are put into one grid."""
        self._sink, self._ranks, self._name, self._joins = sink, frozenset(ranks), name, joins
        self._held: deque[Item] = deque()
        self._grids: list[DisplayGrid] = []
        self._open_from: dict[int, int] = {}
        """The number of the first grid that a rank may join."""
        self._wrote: set[int] = set()
        """The ranks that have written since the last display."""
        self._changed: list[DisplayGrid | RankCard] = []
        self._cards: dict[str, RankCard] = {}
        """The newest display of each id."""
        self._has_results = False

    def expect(self, card: RankCard) -> None:
        """Take note of a display that is on its way, which updates may overtake."""
        if card.display_id is not None:
            self._cards[card.display_id] = card

    def update(self, newer: RankCard) -> None:
        """Put the data of ``newer`` into the display of its id, which an earlier kernel may have shown."""
        card = self._cards.setdefault(newer.display_id or "", newer)
        card.is_shown = card.is_shown or card is newer
        card.data, card.metadata = newer.data, newer.metadata
        self._note_change(card.grid or card)

    def arrange(self, pieces: Iterable[LinePiece], now: float, *, at_once: bool = False) -> Iterator[Item]:
        """Take the next pieces; yield those that go now, with grids in the place of most displays."""
        for piece in pieces:
            if piece.display is None and not self._held:  # the usual case, kept short
                if self._grids:
                    self._wrote.update(piece.ranks)
                yield piece
            else:
                self.add(piece, now)
        yield from self.release(now, at_once=at_once)

    def add(self, piece: LinePiece, now: float) -> None:
        """Take the next piece. Nothing joins text, and displays that no card shows."""
        card = piece.display
        if not isinstance(card, RankCard) or not fits_card(card.data):
            self._held.append(card if isinstance(card, RankCard) else piece)
            if self._grids:
                self._wrote.update(piece.ranks)
            return
        closed = self._ranks if card.is_result and not self._has_results else self._wrote
        self._open_from.update(dict.fromkeys(closed, len(self._grids)))
        self._wrote, self._has_results = set(), self._has_results or card.is_result
        number = max(self._open_from.get(rank, 0) for rank in card.ranks)
        joins = self._joins and number < len(self._grids)
        if not joins or (self._grids[number].is_shown and not self._sink.replaces):
            number = len(self._grids)
            self._grids.append(DisplayGrid(now))
            self._held.append(self._grids[-1])
        card.grid = self._grids[number]
        card.grid.cards.append(card)
        self._open_from.update(dict.fromkeys(card.ranks, number + 1))
        self._note_change(card.grid)

    def release(self, now: float, *, at_once: bool = False) -> Iterator[Item]:
        """Yield the pieces that go now, and the grids."""
        while self._held and (at_once or self._goes_at(self._held[0]) <= now):
            yield self._held.popleft()

    def due_at(self) -> float | None:
        """Return when `arrange` or `draw_again` has something to do; None: not before more comes."""
        first = [self._goes_at(item) for item in itertools.islice(self._held, 1)]
        return min([*first, *(item.draws_again_at for item in self._changed)], default=None)

    def show(self, item: RankCard | DisplayGrid, now: float) -> None:
        """Draw a display or a grid for the first time; a rank that is alone in a grid as any cell is drawn."""
        item.is_shown = True
        self._draw(item, now, update=False)

    def draw_again(self, now: float, *, at_once: bool = False) -> None:
        """Draw again all that has changed, unless that was done a moment ago."""
        for item in [each for each in self._changed if at_once or now >= each.draws_again_at]:
            self._changed.remove(item)
            self._draw(item, now, update=True)

    def _draw(self, grid: RankCard | DisplayGrid, now: float, *, update: bool) -> None:
        if isinstance(grid, RankCard):
            self._draw_alone(grid, grid.display_id, update=update)
            return
        data = grid.cards[0].data
        if len(grid.cards) == 1:
            grid.began_alone = True
            self._draw_alone(grid.cards[0], grid.id, update=update)
        else:
            data = grid_bundle(grid.cards, self._name)
            if grid.began_alone:
                ranks = {rank for card in grid.cards for rank in card.ranks}
                self._sink.display({"text/plain": label(ranks)}, {}, f"{grid.id}.ranks", update=True)
            self._sink.display(data, {}, grid.id, update=update)
        size = sum(len(str(value)) for value in data.values())
        grid.draws_again_at = now + max(DRAW_S, size / CHARACTERS_PER_S)

    def _draw_alone(self, card: RankCard, place: str | None, *, update: bool) -> None:
        data = card.data
        if set(data) == {"text/plain"}:
            data = {"text/plain": label_block(card.ranks, str(data["text/plain"]))}
        elif not update:
            self._sink.display({"text/plain": label(card.ranks)}, {}, place and f"{place}.ranks")
        self._sink.display(data, card.metadata, place, update=update)

    def _goes_at(self, item: Item) -> float:
        if not isinstance(item, DisplayGrid) or not self._joins:
            return 0.0
        is_whole = self._ranks.issubset(rank for card in item.cards for rank in card.ranks)
        return 0.0 if is_whole else item.began + WAIT_S

    def _note_change(self, item: DisplayGrid | RankCard) -> None:
        if item.is_shown and item not in self._changed:
            self._changed.append(item)


# ---- how a grid looks -----------------------------------------------------------------------------------------------

PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
SHOWN = 12
"""The most cards of a grid that are not folded."""
ACROSS = 4
"""The most cards in a row."""
_GRID = "display:flex;flex-wrap:wrap;align-items:flex-start;gap:10px;margin:4px 0 4px 8px;color:inherit"
_CARD = f"flex:1 1 {{share}}%;max-width:100%;border:{LINE};border-radius:4px;padding:4px 8px;box-sizing:border-box"
_CAPTION = f"cursor:pointer;font-size:12px;{CODE_FONT};margin-bottom:4px"
_ODD = f"{themed('color:', *WARNING)};font-weight:700"
_LEAST = "min-width:242px"
"""The least width of a card but for its padding and border, so 260 pixels."""
_WIDE = '<div style="width:1600px;height:0;max-width:none"></div>'


def fits_card(data: Content) -> bool:
    """Whether a card shows all of it: pictures, and HTML without scripts."""
    markup = str(data.get("text/html", ""))
    kinds = {"text/plain", "text/html", *PICTURES}
    return len(data) > ("text/plain" in data) and kinds.issuperset(data) and "<script" not in markup.lower()


def look_of(data: Content) -> tuple[tuple[str, str], ...]:
    """Return a key that is equal for displays that look alike: their text counts where there is nothing else."""
    kinds = set(data) - {"text/plain"} or set(data)
    return tuple((kind, str(data[kind])) for kind in sorted(kinds))


def grid_bundle(cards: Iterable[RankCard], name: Callable[[Sequence[int]], str]) -> Content:
    """Return a grid as HTML and as text, in the order of ranks, equal cards once. name: names ranks by coordinates."""
    groups: dict[tuple[tuple[str, str], ...], list[RankCard]] = {}
    cards = [card for card in cards if any(card.data.values())]  # a cleared one is empty
    for card in sorted(cards, key=lambda card: card.ranks):
        key = look_of(card.data)
        groups.setdefault(key, []).append(card)
    members = group_ranks((rank, key) for key, alike in groups.items() for card in alike for rank in card.ranks)
    count = sum(map(len, members.values()))
    usual = next((key for key, ranks in members.items() if len(ranks) > count / 2), None)
    share = {1: 98, 2: 46, 3: 30}.get(len(groups), 22)
    drawn = [
        _draw(alike[0], members[key], name, share, is_odd=usual not in (None, key)) for key, alike in groups.items()
    ]
    filler = f'<div style="flex:1 1 {share}%;{_LEAST};height:0"></div>' * (ACROSS - 1)
    markup = f'<div style="{_GRID}">{"".join(drawn[:SHOWN])}{filler}</div>'
    if rest := drawn[SHOWN:]:
        more = f'<summary style="{_CAPTION}">{len(rest)} more</summary>'
        markup += f'<details>{more}<div style="{_GRID}">{"".join(rest)}{filler}</div></details>'
    texts = [label_block(members[key], str(alike[0].data.get("text/plain", ""))) for key, alike in groups.items()]
    return {"text/html": markup, "text/plain": "\n".join(texts)}


def _draw(card: RankCard, ranks: Sequence[int], name: Callable[[Sequence[int]], str], share: int, is_odd: bool) -> str:
    caption = f'<span style="{_ODD if is_odd else ""}">{escape(f"{label(ranks)} {name(ranks)}")}</span>'
    picture, content = _content(card)
    return (
        f'<div style="{_CARD.format(share=share)}"><div style="{_LEAST}"></div><details>'
        f'<summary style="{_CAPTION}">{caption}{picture}</summary>{_WIDE}</details>{content}</div>'
    )


def _content(card: RankCard) -> tuple[str, str]:
    """Return the picture of a card, which a click enlarges, and its other content, in which one can mark words."""
    if markup := str(card.data.get("text/html", "")):
        return "", f'<div style="overflow-x:auto">{markup}</div>'
    kind = next((each for each in PICTURES if each in card.data), "")
    if not kind:
        return "", f'<pre style="overflow-x:auto">{escape(str(card.data.get("text/plain", "")))}</pre>'
    data = str(card.data[kind])
    if kind == "image/svg+xml":
        data = base64.b64encode(data.encode()).decode()
    size = card.metadata.get(kind) or {}
    width = size.get("width") if isinstance(size, Mapping) else None
    wide = f' width="{int(width)}"' if isinstance(width, (int, float)) else ""
    words = escape(str(card.data.get("text/plain", "")))
    source = f"data:{kind};base64,{''.join(data.split())}"
    return f'<img src="{source}" alt="{words}"{wide} style="display:block;max-width:100%;height:auto">', ""
