"""What pips on several hosts say becomes one line, and at the end what differs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from patience import wait_until

from meshbook.calls.output import StreamText
from meshbook_extension.commands.pip_progress import PipProgress
from meshbook_extension.output.publisher import Publisher, StreamSink

NAMES = {0: "host a", 4: "host b", 8: "host c"}


class Shown(StreamSink):
    """Keeps the lines that were shown."""

    def __init__(self) -> None:
        super().__init__(lambda *_, **__: None)
        self.lines: list[Sequence[str]] = []

    def bars(self, lines: Sequence[str]) -> None:
        self.lines.append(list(lines))


def say(progress: PipProgress, rank: int, text: str) -> None:
    progress.target.listener(StreamText(rank, "stdout", text, progress.target.id))


def test_hosts_are_counted_and_what_differs_is_named() -> None:
    publisher, shown = Publisher(), Shown()
    progress = PipProgress(7, NAMES, shown, publisher)
    try:
        for rank in NAMES:
            say(progress, rank, "Collecting einops\n  Downloading einops-0.8-py3-none-any.whl (64 kB)\n")
        downloads = "downloads einops-0.8-py3-none-any.whl (64 kB)"
        assert progress.line() == f"pip: 0 of 3 environments done; 3 of them: {downloads}"
        say(progress, 0, "Installing collected packages: einops\nSuccessfully inst")
        say(progress, 0, "alled einops-0.8\n")
        say(progress, 4, "WARNING: einops 0.8 has a conflict\n")
        assert progress.line() == f"pip: 1 of 3 environments done; 2 of them: {downloads}"
        wait_until(lambda: [progress.line()] in shown.lines)
        say(progress, 8, "Requirement already satisfied: einops in /env\n")
        say(progress, 4, "Successfully installed einops-0.8\n")
        assert sorted(progress.summary()) == [
            "host a, host b: Successfully installed einops-0.8",
            "host b: WARNING: einops 0.8 has a conflict",
            "host c: Requirement already satisfied: einops",
        ]
        assert progress.words(8).endswith("Requirement already satisfied: einops in /env")
    finally:
        progress.finish()
        publisher.stop()
    assert shown.lines[-1] == []


def test_nothing_is_shown_after_the_end() -> None:
    publisher, shown = Publisher(), Shown()
    progress = PipProgress(7, NAMES, shown, publisher)
    progress.finish()
    say(progress, 0, "Collecting einops\n")
    progress.pump(time.monotonic())
    publisher.stop()
    assert shown.lines[-1] == []
