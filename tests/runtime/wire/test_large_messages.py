"""What is too large for one message is cut and counted, or refused where it is sent; nothing is sent again for ever."""

from __future__ import annotations

import time

import pytest

from meshbook import ProcMesh
from meshbook.actor import Actor, endpoint
from meshbook.agent.output import BURST_BYTES, TAIL_BYTES, RankLog, RankOutput
from meshbook.calls.output import OutputDropped, OutputEvent, OutputTarget, StreamText
from meshbook.errors import CallFailed
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import new_output_id
from meshbook.mesh.rank_calls import start_cell
from meshbook.system.processes import resident_bytes

pytestmark = pytest.mark.slow

SIZE = 70 << 20
SHOWN_MAX_CHARS = BURST_BYTES + 4 * TAIL_BYTES


def test_late_text_waits_within_the_bounds_of_other_text(tmp_path) -> None:
    output = RankOutput(b"marker", RankLog(tmp_path / "log"), 0.0)
    for _ in range(1000):
        output.add_late(StreamText(-1, "stdout", "x" * 10_000, 7), 0.0)
    pieces, cuts = output.take(0.0, final=True)
    shown = sum(len(piece.text) for piece in pieces)
    assert 0 < shown <= SHOWN_MAX_CHARS and shown + cuts[7] == 10_000_000
    output.log.close()
    assert (tmp_path / "log").stat().st_size == 10_000_000


@pytest.mark.quick("print('x' * 73400320)")
@pytest.mark.parametrize(
    "code",
    [
        f"import threading\nt = threading.Thread(target=print, args=('x' * {SIZE},)); t.start(); t.join()",
        f"print('x' * {SIZE})",
    ],
)
def test_a_print_of_70_mb_is_cut_and_counted(mesh2: ProcMesh, code: str) -> None:
    events: list[OutputEvent] = []
    start_cell(mesh2, code, on_output=events.append).future.get(60)
    shown = sum(len(event.text) for event in events if isinstance(event, StreamText) and event.rank == 0)
    cut = max(event.size_bytes for event in events if isinstance(event, OutputDropped) and event.rank == 0)
    assert shown + cut == SIZE + 1 and 0 < shown <= SHOWN_MAX_CHARS
    assert mesh2.run("rank").get(20).values() == [0, 1]


@pytest.mark.some()
@pytest.mark.quick("raise ValueError('x' * 73400320)")
@pytest.mark.parametrize(
    "code",
    [
        f"raise type('x' * {SIZE}, (Exception,), {{}})",
        f"raise ValueError('x' * {SIZE})",
        f"dist.distributed_c10d._get_default_store().set('large', 'x' * {SIZE})",
    ],
)
def test_a_failure_of_any_size_is_an_answer_of_a_bounded_one(mesh2: ProcMesh, code: str) -> None:
    with pytest.raises(CallFailed) as failed:
        mesh2.run(code).get(60)
    assert len(str(failed.value)) < 1 << 16
    assert mesh2.run("rank").get(20).values() == [0, 1]


def test_an_expression_of_any_length_can_be_evaluated(mesh2: ProcMesh) -> None:
    assert mesh2.evaluate(f"rank{' ' * SIZE}").get(60).values() == [0, 1]


class Loud(Actor):
    @endpoint
    def say(self, lines: int) -> float:
        for _ in range(lines):
            print("x" * 999)
        return time.monotonic()


def test_the_agent_does_not_keep_what_actors_print(mesh2: ProcMesh) -> None:
    heard: list[OutputEvent] = []
    set_front_end(output_source=lambda procs: OutputTarget(new_output_id(procs), heard.append))
    try:
        loud = mesh2.spawn("loud", Loud)
        loud.say.call(1).get(20)
        agent = mesh2._mesh.hosts[0].launched.pid
        before = resident_bytes(agent)
        said = loud.say.call(50_000)
        grown = 0
        while not said.done():
            grown = max(grown, resident_bytes(agent) - before)
            time.sleep(0.05)
        said.get(60)
    finally:
        set_front_end()
    assert grown < 30_000_000
    cuts = {event.rank: event.size_bytes for event in heard if isinstance(event, OutputDropped)}
    shown = sum(len(event.text) for event in heard if isinstance(event, StreamText))
    assert sum(cuts.values()) + shown == 2 * 50_001_000
