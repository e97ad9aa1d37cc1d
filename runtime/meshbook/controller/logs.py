"""The logs of ranks, which lie on their hosts and belong to the agents there: their ends, and what is added."""

from __future__ import annotations

import codecs
import time
from typing import NamedTuple

from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.controller.queries import Questions
from meshbook.shape.members import Members
from meshbook.wire import messages as wire

ANSWER_TIMEOUT_S = 5.0
BURST_BYTES = 128 << 10
"""What a follower brings of all logs together at once; then `RATE_BYTES_S`."""
RATE_BYTES_S = 16 << 10
LEAST_BYTES = 1 << 10
"""Of each log and look, however many there are."""


def read_logs(
    questions: Questions, mesh: MeshState, members: Members, lines: int, containing: str = ""
) -> dict[int, str]:
    """The last ``lines`` lines of each member's log, as far as the agents answer.

    containing: only lines with this text.
    """
    return questions.gather(mesh, members.ranks(), wire.ReadLogs(lines, containing), str, ANSWER_TIMEOUT_S)


class LogText(NamedTuple):
    """What a rank has added to its log."""

    rank: int
    text: str
    """May end in the middle of a line."""
    skipped_bytes: int
    """What came before it and is in the log only: more was written than is brought at once."""


class LogFollower:
    """Remembers how far each log was read."""

    def __init__(self, questions: Questions, mesh: MeshState, members: Members, lines: int) -> None:
        """lines: of what was written before, so many lines are brought too."""
        self._questions, self._mesh, self._lines = questions, mesh, lines
        self._generation = mesh.generation
        self._offsets = dict.fromkeys(members.ranks(), wire.FROM_THE_END)
        self._decoders = {rank: codecs.getincrementaldecoder("utf-8")("backslashreplace") for rank in self._offsets}
        self._room, self._refilled = float(BURST_BYTES), time.monotonic()

    def look(self) -> list[LogText]:
        """What is new, by rank. Waits for the answers of the agents; a silent one is asked again next time.

        Raises: LayoutError if ranks have got other numbers meanwhile, MeshStoppedError.
        """
        mesh = self._mesh
        mesh.check_usable()
        if mesh.generation != self._generation:
            raise stale_view(mesh)
        limit_bytes = max(LEAST_BYTES, int(self._room_now()) // len(self._offsets))
        answers = self._questions.gather(
            mesh,
            self._offsets,
            lambda ranks: wire.ReadOn(tuple((rank, self._offsets[rank]) for rank in ranks), self._lines, limit_bytes),
            wire.LogPiece,
            ANSWER_TIMEOUT_S,
        )
        pieces = [piece for rank, piece in sorted(answers.items()) if rank in self._offsets]
        self._offsets.update((piece.rank, piece.end) for piece in pieces)
        self._room = max(0.0, self._room - sum(len(piece.data) for piece in pieces))
        texts = [
            LogText(piece.rank, self._decoders[piece.rank].decode(piece.data), piece.skipped_bytes) for piece in pieces
        ]
        return [text for text in texts if text.text or text.skipped_bytes]

    def _room_now(self) -> float:
        now = time.monotonic()
        self._room = min(BURST_BYTES, self._room + (now - self._refilled) * RATE_BYTES_S)
        self._refilled = now
        return self._room
