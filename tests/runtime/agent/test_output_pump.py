"""What leaves an agent of what its ranks print: one message, equal texts once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from meshbook.agent.output import RankOutput
from meshbook.agent.output_pump import OfflineQuota, OutputPump
from meshbook.agent.rank_log import RankLog
from meshbook.wire.messages import SharedText, StreamTexts

RANKS = 3


class Host:
    """A pump over the outputs of three ranks; what it sends is kept."""

    def __init__(self, folder: Path) -> None:
        self.logs = [RankLog(folder / f"rank-{rank}.log") for rank in range(RANKS)]
        self.outputs = [RankOutput(b"\x1e0123456789abcdef:", log, now=0.0) for log in self.logs]
        self.workers = [Mock(rank=rank, output=output) for rank, output in enumerate(self.outputs)]
        self.uplink, self.loop = Mock(), Mock()
        pool = Mock(workers=dict(enumerate(self.workers)))
        self.pump = OutputPump(self.loop, self.uplink, OfflineQuota(), pool)

    def print(self, rank: int, text: str, stream: str = "stdout") -> None:
        self.outputs[rank].feed(stream, text.encode(), 0.0)

    def sent(self) -> list[tuple[SharedText, ...]]:
        """The texts of each message since the last time."""
        messages = [cast(StreamTexts, call.args[0]).texts for call in self.uplink.send.call_args_list]
        self.uplink.reset_mock()
        return messages


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    for log in host.logs:
        log.close()


def _said(text: SharedText) -> tuple[tuple[int, ...], str, str]:
    return text.ranks, text.stream, text.text


def _of_rank(messages: list[tuple[SharedText, ...]], rank: int) -> str:
    return "".join(text.text for texts in messages for text in texts if rank in text.ranks)


def test_equal_texts_of_several_ranks_travel_once_and_in_one_message(host: Host) -> None:
    for rank, text in enumerate(["same\n", "other\n", "same\n"]):
        host.print(rank, text)
    host.pump.flush()
    (message,) = host.sent()
    assert [_said(text) for text in message] == [((0, 2), "stdout", "same\n"), ((1,), "stdout", "other\n")]


def test_a_lone_line_behind_equal_ones_does_not_wait(host: Host) -> None:
    for rank in range(RANKS):
        host.print(rank, "same\n")
    host.print(1, "lone\n")
    host.pump.flush()
    assert _of_rank(host.sent(), 1) == "same\nlone\n"


def test_equal_texts_of_different_streams_or_cells_stay_apart(host: Host) -> None:
    host.print(0, "same\n")
    host.print(1, "same\n", "stderr")
    host.print(2, "\x1e0123456789abcdef:7\nsame\n")
    host.pump.flush()
    (message,) = host.sent()
    assert [(text.ranks, text.stream, text.output) for text in message] == [
        ((0,), "stdout", 0), ((1,), "stderr", 0), ((2,), "stdout", 7)
    ]  # fmt: skip


def test_a_rank_that_is_ahead_does_not_wait_for_the_others(host: Host) -> None:
    flood = "a line of a flood\n" * 4096
    for rank in range(RANKS):
        host.print(rank, flood)
    host.print(2, "next\n")
    host.pump.flush()
    (message,) = host.sent()
    assert [_said(text) for text in message] == [((0, 1), "stdout", flood), ((2,), "stdout", f"{flood}next\n")]
