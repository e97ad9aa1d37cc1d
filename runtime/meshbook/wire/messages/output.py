"""What ranks print and show, and the prompts at which they stop."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshbook.wire.messages.base import Header

PLACE, SHOWN_HERE = b"=", b"*"
"""What stands in a mark before the number of a place, and of one where rich output belongs."""

OWN_RANK = -1
"""In what a worker tells of its output: its agent fills in the rank, and the mesh."""


class StreamText(Header, frozen=True, tag="text"):
    """Text of stdout or stderr; may end in the middle of a line.

    From a worker: of an output that is not the running one, which cannot go through the pipes.
    """

    rank: int
    stream: str
    text: str
    output: int
    place: int = 0
    """Text of stdout and of stderr with one number was written in an order that nobody knows."""


class SharedText(Header, frozen=True):
    """A text as in `StreamText` that each of these ranks has printed: it travels once."""

    ranks: tuple[int, ...]
    stream: str
    text: str
    output: int
    place: int


class StreamTexts(Header, frozen=True, tag="texts"):
    """What ranks of one host have printed since the message before, in the order of each rank."""

    texts: tuple[SharedText, ...]


class OutputDropped(Header, frozen=True, tag="cut"):
    """So many characters of the rank's output, up to now, are in its log only: it wrote faster than can be shown."""

    rank: int
    size_bytes: int
    log_path: str
    output: int
    lacks: str = ""
    """Why its log is incomplete; then this comes for output that is shown too."""


class Bundle(msgspec.Struct):
    """What is shown, by kinds of content; a frame of its own, made by a rank."""

    data: dict[str, object]
    metadata: dict[str, object]
    transient: dict[str, object]


class DisplayData(Header, frozen=True, tag="display"):
    """Rich output; ``is_result`` for the value of a cell's last expression."""

    rank: int
    output: int
    update: bool
    is_result: bool
    place: int = 0
    """Of the mark that the worker writes into its pipes behind this; 0 for none, where its text is late."""
    data: dict[str, object] = {}
    """This and what follows travels as a `Bundle`, which agents do not read."""
    metadata: dict[str, object] = {}
    transient: dict[str, object] = {}


class AtPrompt(NamedTuple):
    """A rank waits for a line at its prompt ``number``; without a place it has gone on, and waits at none."""

    number: int
    """Counts the prompts of the process."""
    place: str
    """``cell 7, line 5``"""
    why: str
    """For a post-mortem: the exception. Else empty."""
    prompt: str
    """``(Pdb) ``, or what else pdb asks with."""
    text: str
    """What pdb has written since the prompt before."""


class Prompted(Header, frozen=True, tag="prompted"):
    """A rank has stopped at a prompt of pdb, or gone on from one; in the order of what it prints."""

    mesh: int
    rank: int
    output: int
    at: AtPrompt
