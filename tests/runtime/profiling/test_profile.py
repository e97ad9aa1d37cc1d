"""Profiles of ranks: what the events add up to, and one trace of all of them on one clock."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

from collector import Collector

from meshbook.groups.progress import Operation
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.profiles import Profile, collect
from meshbook.mesh.rank_calls import start_cell
from meshbook.profiling.events import Event, RankEvents, arrows, place_in_lanes, write_trace

SHIFT_US = -1e9


def _event(name: str, ts: float, dur: float, tid: int = 7, cat: str = "cpu_op") -> Event:
    return Event("X", name, cat, pid=1, tid=tid, ts=ts - SHIFT_US, dur=dur)


def test_self_time_leaves_out_what_was_called_on_the_same_thread() -> None:
    events = RankEvents([_event("mm", 10, 50), _event("copy", 20, 10), _event("mm", 70, 5, tid=8)], SHIFT_US, 7)
    events.add_cell("cell 7", 0.0, 100e-6)
    times = {name: (calls, round(own_s * 1e6)) for name, (calls, own_s, _) in events.op_times().items()}
    assert times == {"mm": (2, 45), "copy": (1, 10), "cell 7": (1, 50)}


def test_a_wait_is_no_work_of_the_operation_around_it() -> None:
    events = RankEvents([_event("c10d::allreduce_", 0, 10)], SHIFT_US, 7)
    events.add_cell("cell 7", 0.0, 0.01)
    events.add_wait("waiting: all_reduce", 0.002, 0.008)
    times = {name: own_s for name, (_, own_s, _) in events.op_times().items()}
    assert abs(times["waiting: all_reduce"] - 0.006) < 0.0001 and abs(times["cell 7"] - 0.004) < 0.0001


def test_time_on_gpus_is_counted_once_where_kernels_overlap() -> None:
    kernels = [("ncclDevKernel_AllReduce", 0, 100), ("gemm", 50, 100), ("gemm", 300, 10)]
    events = RankEvents([_event(*kernel, cat="kernel") for kernel in kernels], SHIFT_US, 7)
    busy_s, nccl_s = events.gpu_times()
    assert (round(busy_s * 1e6), round(nccl_s * 1e6)) == (160, 100)
    assert events.op_times()["gemm"][0] == 2 and round(events.op_times()["gemm"][2] * 1e6) == 110


def test_the_longest_events_are_kept_and_belong_to_their_rank() -> None:
    events = RankEvents([_event(f"op{number}", number, number + 1) for number in range(10)], SHIFT_US, 7)
    assert events.keep_longest(3) == 7
    chrome: list[dict[str, Any]] = json.loads(b"[" + events.chrome(0) + b"]")
    spans = [event for event in chrome if event["ph"] == "X"]
    assert sorted(event["name"] for event in spans) == ["op7", "op8", "op9"]
    assert all(event["pid"] == 0 for event in chrome)
    assert [event["args"] for event in chrome if event["name"] == "thread_name"] == [{"name": "main thread"}]


def _operation(number: int, begun: float, ended: float, group: str = "0") -> Operation:
    return Operation(1, group, "all_reduce", number, True, begun, ended)


def test_operations_that_overlap_lie_in_lanes_of_their_own() -> None:
    operations = [_operation(1, 0, 3), _operation(2, 1, 2), _operation(3, 2.5, 4), _operation(4, 3, 5)]
    assert [(each.number, lane) for each, lane in place_in_lanes(operations)] == [(1, 0), (2, 1), (3, 1), (4, 0)]


def test_arrows_lead_from_the_last_one_to_those_that_waited_for_it() -> None:
    late = {rank: [(_operation(1, 0.5 if rank == 2 else 0.1, 0.6), 0)] for rank in range(3)}
    made = arrows(late)
    assert [(end["ph"], end["pid"]) for end in made] == [("s", 2), ("f", 0), ("s", 2), ("f", 1)]
    assert arrows({0: [(_operation(1, 0, 1), 0)], 1: [(_operation(1, 0.5, 1, group="1"), 0)]}) == []


CELL = """
import time
time.sleep(0.4 if rank == 1 else 0)
(torch.ones(50, 50) @ torch.ones(50, 50)).sum()
dist.all_reduce(torch.ones(1))
"""


def _profiled(procs: ProcMesh, code: str) -> Profile:
    begun_s = time.time()
    run = start_cell(procs, code, on_output=Collector(), profile="cell 7")
    run.future.exception(60)
    return collect(procs, "cell 7", run.durations_s, begun_s)


def test_ranks_are_profiled_and_their_traces_are_one_file_on_one_clock(mesh2x2: ProcMesh, tmp_path: Path) -> None:
    profile = _profiled(mesh2x2, CELL)
    assert list(profile.traces) == [0, 1, 2, 3] and not profile.problems
    assert 0 < profile.clock_error_s < 1  # the hosts of this mesh are asked for their clocks
    traces = profile.traces
    assert traces[1].waited_s < 0.2 and min(traces[rank].waited_s for rank in (0, 2, 3)) > 0.25
    assert all(trace.ops["aten::mm"].calls == 1 for trace in traces.values())
    assert traces[1].ops["cell 7"].self_s > 0.35 > traces[0].ops["cell 7"].self_s
    path = tmp_path / "trace.json.gz"
    assert write_trace(path, traces, {rank: f"rank {rank} there" for rank in range(4)}) == path.stat().st_size
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {rank: f"rank {rank} there" for rank in range(4)}
    reduces = {event["pid"]: event for event in events if event.get("cat") == "collective"}
    assert sorted(reduces) == [0, 1, 2, 3] and len({event["args"]["number"] for event in reduces.values()}) == 1
    ends = [event["ts"] + event["dur"] for event in reduces.values()]
    assert max(ends) - min(ends) < 200_000  # they end together
    assert {(event["ph"], event["pid"]) for event in events if event.get("cat") == "waited for"} >= {("s", 1), ("f", 0)}
    assert all(-100_000 < event["ts"] < 30e6 for event in events if "ts" in event)
    assert list(tmp_path.iterdir()) == [path]


def test_a_cell_that_fails_has_a_profile_and_a_rank_that_ended_has_none(mesh2: ProcMesh) -> None:
    failed = _profiled(mesh2, "torch.ones(3) + 1\n1 / 0")
    assert sorted(failed.traces) == [0, 1] and "aten::add" in failed.traces[0].ops
    ended = _profiled(mesh2, "import os\nif rank == 1: os._exit(3)")
    assert sorted(ended.traces) == [0] and ended.problems == {1: "it has ended"}


def test_a_long_cell_is_recorded_at_its_begin(mesh4: ProcMesh) -> None:
    mesh4.run("import meshbook.profiling.recorder as p\np.RECORD_S = 0.3").get(60)
    cell = "import time\nfor _ in range(15): torch.ones(9) + 1; time.sleep(0.1)\ntorch.ones(9).cumsum(0)"
    profile = _profiled(mesh4, cell)
    mesh4.run("p.RECORD_S = 20.0").get(60)
    for trace in profile.traces.values():
        assert trace.is_cut and trace.cell_s < 1.2 and "aten::add" in trace.ops and "aten::cumsum" not in trace.ops
    assert not _profiled(mesh4, "torch.ones(9) + 1").traces[0].is_cut


def test_what_was_profiled_is_taken_once_and_a_profiler_in_the_cell_is_told_of(mesh4: ProcMesh) -> None:
    _profiled(mesh4, "1")
    assert set(collect(mesh4, "cell 7", mesh4.ranks, 0.0).problems.values()) == {"cell 7 did not run there"}
    mesh4.run("from torch.profiler import profile\nown = profile(); own.start()").get(60)
    profile = _profiled(mesh4, "2")
    mesh4.run("own.stop()").get(60)
    assert all("torch.profiler did not st" in problem for problem in profile.problems.values()), profile
