"""What a rank shows, on its way to the agent: marks in its pipes, and messages for what pipes do not carry."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping

from meshbook.concurrency.thread_interrupts import gate_of_this_thread
from meshbook.errors import MessageTooLarge
from meshbook.formatting import format_bytes
from meshbook.shell.shell import RankShell
from meshbook.wire import messages as wire
from meshbook.wire.messages import PLACE, SHOWN_HERE
from meshbook.worker.channel import AgentChannel
from meshbook.worker.interrupt_gate import InterruptGate
from meshbook.worker.mail import WorkerMail

LATE_PIECE_CHARS = 1 << 16


class WorkerOutput:
    """What the shell calls (`meshbook.shell.shell.OutputSink`).

    marker: as in `meshbook.wire.messages.workers.Begin`.
    """

    def __init__(self, shell: RankShell, gate: InterruptGate, calls: AgentChannel, mail: WorkerMail) -> None:
        self._shell, self._gate, self._calls, self._mail = shell, gate, calls, mail
        self.marker = b""
        self.current = -1
        """The output id of what goes into the pipes."""
        self._places = itertools.count(1)

    def begin(self, output: int) -> None:
        """Tell the agent, in the pipes themselves, that what follows belongs to ``output``."""
        self.current = output
        self._shell.mark_text(self.marker + b"%d\n" % output)

    def display(
        self,
        data: Mapping[str, object],
        metadata: Mapping[str, object],
        transient: Mapping[str, object],
        *,
        update: bool,
        is_result: bool,
        cell_id: int,
        is_late: bool,
    ) -> None:
        self._shell.flush_text()
        content = wire.encode(wire.Bundle(*map(_by_text, (data, metadata, transient))))
        with self._gate.shield:  # sent first: so it is on its way when the agent reads the mark
            place = 0 if is_late else next(self._places)
            try:
                self._lane().send(wire.DisplayData(wire.OWN_RANK, cell_id, update, is_result, place), [content])
            except MessageTooLarge as error:
                size, limit = format_bytes(error.size_bytes), format_bytes(error.limit_bytes)
                print(f"{size} to be shown at once are left out; {limit} are the most", file=sys.stderr)
                return
            if place:
                self._shell.mark_text(self.marker + SHOWN_HERE + b"%d\n" % place)

    def mark_place(self) -> None:
        with self._gate.shield:
            self._shell.mark_text(self.marker + PLACE + b"%d\n" % next(self._places))

    def late_text(self, stream: str, text: str, cell_id: int) -> None:
        for at in range(0, len(text), LATE_PIECE_CHARS):  # the agent cuts what is too much, a piece at a time
            self._lane().send(wire.StreamText(wire.OWN_RANK, stream, text[at : at + LATE_PIECE_CHARS], cell_id))

    def _lane(self) -> AgentChannel | WorkerMail:
        """Where replies of the calling thread will go, so that what it shows comes before them."""
        return self._calls if gate_of_this_thread() is None else self._mail

    def tell_prompt(self, at: wire.AtPrompt) -> None:
        self._shell.flush_text()
        self._calls.send(wire.Prompted(0, wire.OWN_RANK, self._shell.output_here or self.current, at))


def _by_text(items: Mapping[str, object]) -> dict[str, object]:
    """Kinds of content are text, whatever a user's bundle has."""
    return {kind if type(kind) is str else str(kind): item for kind, item in items.items()}
