"""What cells print and show: whose it is, what is cut, where it is kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from collector import Collector

from meshbook import ProcMesh
from meshbook.calls.output import DisplayData, StreamText
from meshbook.mesh.rank_calls import start_cell


def _run(mesh: ProcMesh, code: str) -> Collector:
    collector = Collector()
    start_cell(mesh, code, on_output=collector).future.get(60)
    return collector


def test_all_text_comes_before_the_rank_is_done(mesh4: ProcMesh) -> None:
    got = _run(mesh4, "for i in range(2000): print(i)")
    for rank in range(4):
        events = [e for e in got.events if e.rank == rank]
        assert events[-1] is next(e for e in got.done if e.rank == rank)
        assert got.text(rank) == "".join(f"{i}\n" for i in range(2000))


def test_a_flood_is_bounded_counted_and_kept_in_the_log(mesh4: ProcMesh) -> None:
    lines = 40_000
    mark = f"flood-{time.monotonic_ns()}"
    got = _run(mesh4, f"for i in range({lines}): print('{mark}', i, 'x' * 60)")
    for rank in range(4):
        cut = max((e.size_bytes for e in got.cuts if e.rank == rank), default=0)
        whole = sum(len(f"{mark} {i} {'x' * 60}\n") for i in range(lines))
        assert cut > 0
        assert len(got.text(rank)) + cut == whole
        log = Path(mesh4.log_paths()[rank]).read_text()
        assert log.count(mark) == lines


def test_other_calls_are_answered_during_a_flood(mesh4: ProcMesh) -> None:
    collector = Collector()
    run = start_cell(mesh4, "while True: print('x' * 80)", on_output=collector)
    collector.wait_for(lambda: len(collector.events) > 4)
    started = time.monotonic()
    assert all(status.state == "busy" for status in mesh4.status())
    assert time.monotonic() - started < 2
    interrupted = run.interrupt()
    assert interrupted.obeyed == (0, 1, 2, 3)


def test_logs_give_the_last_lines(mesh4: ProcMesh) -> None:
    _run(mesh4, "for i in range(10): print('line', i, 'of', rank)")
    logs = mesh4.slice(gpus=slice(1, 3)).logs(lines=2)
    assert logs == {r: f"line 8 of {r}\nline 9 of {r}" for r in (1, 2)}


DDP = """
import time
if rank == 3:
    def slow(grad): time.sleep(0.5)
    model[0].weight.register_hook(slow)
for _ in range(2):
    ddp(torch.ones(8, 4)).sum().backward()
"""


def test_waits_of_collectives_are_counted_also_those_of_a_backward_pass(mesh4: ProcMesh) -> None:
    run = start_cell(
        mesh4, "import time; time.sleep(0.5 if rank == 1 else 0); dist.all_reduce(torch.ones(1))", on_output=Collector()
    )
    run.future.get(30)
    assert run.waited_s[1] < 0.2 and min(run.waited_s[rank] for rank in (0, 2, 3)) > 0.3
    _run(
        mesh4,
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)); ddp = DDP(model)",
    )
    run = start_cell(mesh4, DDP, on_output=Collector())
    run.future.get(60)
    assert run.waited_s[3] < 0.5 and min(run.waited_s[rank] for rank in (0, 1, 2)) > 0.7


def test_a_flood_does_not_silence_the_next_cell(mesh4: ProcMesh) -> None:
    _run(mesh4, "for i in range(40_000): print(i, 'x' * 60)")
    next_cell = Collector()
    run = start_cell(mesh4, "import time\nprint('at once')\ntime.sleep(30)", on_output=next_cell)
    next_cell.wait_for(lambda: all("at once" in next_cell.text(r) for r in range(4)), timeout_s=10)
    run.interrupt()


@pytest.mark.slow
def test_a_job_keeps_its_listener_however_many_other_cells_are_run(mesh4: ProcMesh) -> None:
    got = Collector()
    job = start_cell(mesh4.slice(gpus=0), "import time\nwhile True: print('step'); time.sleep(0.05)", on_output=got)
    others = [start_cell(mesh4.slice(gpus=1), "pass", on_output=Collector()) for _ in range(1400)]
    for other in others:
        other.future.get(60)
    steps = got.text(0).count("step")
    got.wait_for(lambda: got.text(0).count("step") > steps)
    job.interrupt()


ORDERED = """
import os, sys, subprocess
from IPython.display import HTML, display
for k in range(40):
    print("before", k)
    handle = display(HTML(f"figure {k}"), display_id=True)
    print("after", k)
    print("error", k, file=sys.stderr)
    if k % 8 == 0:
        !echo child $k; echo child error $k >&2
    print("half", end="")
    display(HTML(f"again {k}"))
    print(" done", k)
"""


def _said(event: object) -> list[str]:
    if isinstance(event, StreamText):
        return event.text.splitlines()
    return [str(event.data["text/html"])] if isinstance(event, DisplayData) else []


@pytest.mark.slow
def test_text_and_displays_of_a_rank_come_in_the_order_of_the_code(mesh4: ProcMesh) -> None:
    expected: list[str] = []
    for k in range(40):
        expected += [f"before {k}", f"figure {k}", f"after {k}", f"error {k}"]
        expected += [f"child {k}", f"child error {k}"] if k % 8 == 0 else []
        expected += ["half", f"again {k}", f" done {k}"]
    for _ in range(5):
        got = _run(mesh4, ORDERED)
        for rank in range(4):
            said = [line for event in got.events if event.rank == rank for line in _said(event)]
            for k in range(0, 40, 8):  # what a command says on both has no order
                at = said.index(f"child {k}")
                if said[at - 1] == f"child error {k}":
                    said[at - 1 : at + 1] = [f"child {k}", f"child error {k}"]
            assert said == expected
