"""A sink that remembers, and the events of ranks in short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshbook.calls.output import DisplayData, OutputDropped, RankDone, StreamText
from meshbook.errors import Failure, FailureKind


class RecordingSink:
    """Beside `KernelSink` and `StreamSink`: keeps what it is given."""

    replaces = True

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []

    def stream(self, name: str, text: str) -> None:
        self.messages.append((name, text))

    def display(
        self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str | None = None, update: bool = False
    ) -> None:
        if "border-left:3px" in data.get("text/html", ""):
            self.messages.append(("message", f"{data['text/plain']}\n"))  # a card of ours
            return
        self.messages.append(("update" if update else "display", (dict(data), display_id)))

    def bars(self, lines: Sequence[str]) -> None:
        self.messages.append(("bars", list(lines)))

    def text(self, *kinds: str) -> str:
        return "".join(content for kind, content in self.messages if kind in (kinds or ("stdout", "stderr", "message")))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.messages]


def out(rank: int, text: str, stream: str = "stdout") -> StreamText:
    return StreamText(rank, stream, text, 1)


def cut(rank: int, size_bytes: int, lacks: str = "") -> OutputDropped:
    return OutputDropped(rank, size_bytes, f"/logs/rank-{rank}.log", 1, lacks)


def done(rank: int, failure: Failure | None = None) -> RankDone:
    return RankDone(rank, failure is None, 0.5, failure)


def failure(rank: int, evalue: str = "bad shard", ename: str = "ValueError") -> Failure:
    kinds = {"KeyboardInterrupt": FailureKind.INTERRUPTED, "WorkerLost": FailureKind.LOST}
    kind = kinds.get(ename, FailureKind.RAISED)
    return Failure(rank, "here", ename, evalue, ("Traceback", f"{ename}: {evalue}"), "cell 7, line 3", kind)


def shown(
    rank: int,
    data: Mapping[str, object],
    *,
    display_id: str | None = None,
    update: bool = False,
    is_result: bool = False,
) -> DisplayData:
    return DisplayData(
        rank, 1, update, is_result, data=dict(data), transient={"display_id": display_id} if display_id else {}
    )
