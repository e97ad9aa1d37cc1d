"""`meshbook.log` on real ranks, in their actors, threads and children, and in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

import meshbook
from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, endpoint
from meshbook.curves.recorder import own
from meshbook.curves.series import Points
from meshbook.errors import CallFailed
from meshbook.mesh import states
from meshbook.mesh.rank_calls import start_cell

LIMIT_S = 20.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def latest(mesh: ProcMesh, name: str) -> dict[int | None, Points]:
    return states.metrics(mesh).latest(name)


def test_what_a_cell_has_logged_is_there_when_it_ends(mesh4: ProcMesh) -> None:
    mesh4.run(
        """
        import meshbook
        for i in range(5):
            meshbook.log(ended=rank + i, lr=torch.tensor([0.5]), step=10 * i)
        """
    ).get()
    found = latest(mesh4, "ended")
    assert sorted(found, key=str) == [0, 1, 2, 3]
    assert found[2].values.tolist() == [2, 3, 4, 5, 6]
    assert found[2].steps.tolist() == [0, 10, 20, 30, 40]
    assert abs(found[2].times[-1] - time.time()) < 60
    assert latest(mesh4, "lr")[0].values.tolist() == [0.5] * 5
    assert "ended    0-3" in repr(meshbook.metrics(mesh4))


def test_a_first_value_comes_while_the_rank_computes(mesh4: ProcMesh) -> None:
    call = mesh4.execute(_log_and_compute, 3.0)
    until(lambda: len(latest(mesh4, "busy")) == 4)
    assert not call.done()
    call.get()


def _log_and_compute(seconds: float) -> None:
    meshbook.log(busy=1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def test_names_count_their_own_calls_in_each_cell(mesh4: ProcMesh) -> None:
    for _ in range(2):
        code = "import meshbook\nfor i in range(3): meshbook.log(counted=i)\nmeshbook.log(other=0)"
        start_cell(mesh4, code, on_output=lambda event: None).future.result(LIMIT_S)
        assert latest(mesh4, "counted")[0].steps.tolist() == [0, 1, 2]
        assert latest(mesh4, "other")[0].steps.tolist() == [0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("log(loss='high')", "TypeError: loss is a str, not a number"),
        ("log(loss=None)", "TypeError: loss is a NoneType, not a number"),
        ("log(loss=[1, 2])", "TypeError: loss is a list, not a number: log loss.mean()"),
        ("log(loss=torch.ones(3))", "TypeError: loss is a tensor of shape (3,): log loss.mean()"),
        ("log(loss=numpy.ones((2, 2)))", "TypeError: loss is a array of shape (2, 2): log loss.mean()"),
        ("log(loss=1j)", "TypeError: loss is a complex, not a number"),
        ("log(loss=torch.tensor(1j))", "TypeError: loss is a complex, not a number"),
        ("log(loss=10**400)", "ValueError: loss has more digits than a float holds"),
        ("log(torch.ones(()))", "TypeError: log() needs names: meshbook.log(loss=loss)"),
        ("log(loss=1, step='a')", "TypeError: step is a str, not a number"),
        ("log(loss=1, step=float('nan'))", "ValueError: step is nan: give a number of at most 2**53"),
        ("[log(**{f'name {i}': i}) for i in range(2000)]", "is one name too many: 1000 are the most"),
        ("log(**{'x' * 300: 1})", "is longer than 200 characters"),
    ],
    ids=range(13),
)
def test_bad_input_is_an_error_that_names_the_metric(mesh2: ProcMesh, code: str, words: str) -> None:
    with pytest.raises(CallFailed) as caught:
        mesh2.run(f"import numpy\nfrom meshbook import log\n{code}").get()
    assert words.replace("a array", "an array") in str(caught.value)


def test_numbers_of_many_kinds(mesh4: ProcMesh) -> None:
    mesh4.run(
        """
        import numpy, meshbook
        for value in (1, True, 2.5, numpy.float32(0.5), numpy.int64(7), numpy.bool_(True), numpy.ones(1),
                      torch.tensor(3.0, requires_grad=True), torch.ones(1, 1, dtype=torch.bfloat16),
                      torch.nn.Parameter(torch.ones(())), float("nan"), float("inf"), -float("inf")):
            meshbook.log(kinds=value)
        """
    ).get()
    values = latest(mesh4, "kinds")[1].values.tolist()
    assert values[:10] == [1, 1, 2.5, 0.5, 7, 1, 1, 3, 1, 1]
    assert math.isnan(values[10])
    assert values[11:] == [math.inf, -math.inf]


class Trainer(Actor):
    @endpoint
    def step(self, n: int) -> int:
        meshbook.log(of_actor=n * n, step=n)
        return n

    @endpoint
    async def later(self, n: int) -> int:
        meshbook.log(of_actor=n * n, step=n)
        return n


def test_actors_log(mesh4: ProcMesh) -> None:
    trainers = mesh4.spawn("trainers", Trainer)
    for n in range(4):
        trainers.step.call(n).get()
    trainers.later.call(4).get()
    until(lambda: all(points.steps.tolist() == [0, 1, 2, 3, 4] for points in latest(mesh4, "of_actor").values()))
    assert latest(mesh4, "of_actor")[3].values.tolist() == [0, 1, 4, 9, 16]
    trainers.stop().get()


def test_threads_of_ranks_log_for_their_cell_also_when_it_has_ended(mesh4: ProcMesh) -> None:
    mesh4.run(
        """
        import threading, time, meshbook
        def work():
            for n in range(20):
                meshbook.log(of_thread=n)
                time.sleep(0.02)
        threading.Thread(target=work).start()
        """
    ).get()
    until(lambda: [len(points.values) for points in latest(mesh4, "of_thread").values()] == [20] * 4)
    assert latest(mesh4, "of_thread")[0].steps.tolist() == list(range(20))


def test_a_forked_child_says_that_it_records_nothing(mesh2: ProcMesh) -> None:
    mesh2.run(
        """
        import os, meshbook
        meshbook.log(forked=1)
        if not (child := os.fork()):
            meshbook.log(forked=2)
            meshbook.log(forked=3)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        meshbook.log(forked=4)
        """
    ).get()
    assert [points.values.tolist() for points in latest(mesh2, "forked").values()] == [[1, 4], [1, 4]]
    for path in mesh2.log_paths().values():
        with open(path) as log:
            assert log.read().count("records nothing in a forked process") == 1


def test_a_data_loader_with_workers_goes_on(mesh2: ProcMesh) -> None:
    mesh2.run(
        """
        import meshbook
        from torch.utils.data import DataLoader
        for batch in DataLoader(range(8), num_workers=1):
            meshbook.log(loaded=batch)
        """
    ).get()
    assert latest(mesh2, "loaded")[1].values.tolist() == list(range(8))


def test_a_rank_that_dies_keeps_what_it_logged(mesh2: ProcMesh) -> None:
    call = mesh2.run(
        """
        import meshbook, os, signal, time
        for i in range(10):
            meshbook.log(dying=i)
        time.sleep(1 if rank else 2)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    until(lambda: len(latest(mesh2, "dying")) == 2)
    with pytest.raises(meshbook.MeshError):
        call.get()
    assert latest(mesh2, "dying")[1].values.tolist() == list(range(10))


def test_a_flood_is_thinned_where_it_begins_and_keeps_its_spikes(mesh4: ProcMesh) -> None:
    costs_s = mesh4.run(
        """
        import meshbook, time
        spent = time.thread_time()
        for i in range(100_000):
            meshbook.log(flood=1000.0 if i == 54_321 else 0.5)
        (time.thread_time() - spent) / 100_000
        """
    ).get()
    for rank, series in states.metrics(mesh4).series("flood").items():
        assert series.logged == 100_000, rank
        assert series.high == 1000.0, rank
    assert len(latest(mesh4, "flood")[0].values) < 4000
    assert min(costs_s.values()) < 100e-6, f"about 1 us on a quiet machine: {costs_s}"


@pytest.mark.slow
def test_eight_ranks_with_a_thousand_scalars_a_second_lose_nothing(clean_end: None) -> None:
    with this_host().spawn_procs({"gpus": 8}, name="eight") as mesh:
        call = mesh.run(
            """
            import meshbook, time
            began = time.monotonic()
            for i in range(3000):
                meshbook.log(steady=i, step=i)
                while time.monotonic() < began + i / 1000:
                    time.sleep(0.001)
            """
        )
        until(lambda: len(latest(mesh, "steady")) == 8)
        call.get()
        for series in states.metrics(mesh).series("steady").values():
            assert (series.logged, series.low, series.high, series.last) == (3000, 0, 2999, 2999)
        names = {f"of 64: {n}": n for n in range(64)}
        mesh.execute(_log_many, names).get()
        assert len([name for name in states.metrics(mesh).names() if name.startswith("of 64")]) == 64
        assert all(len(latest(mesh, name)[7].values) == 100 for name in names)


def _log_many(names: dict[str, int]) -> None:
    for step in range(100):
        meshbook.log(step, **names)


def test_this_process_logs_without_a_rank() -> None:
    for i in range(3):
        meshbook.log(own_loss=i)
    until(lambda: [values.values.tolist() for values in own.latest("own_loss").values()] == [[0, 1, 2]])
    assert [row.rank for row in meshbook.metrics() if row.name == "own_loss"] == [None] * 3
