"""Peeks into ranks whose main thread is somewhere special: in a lock, a finalizer, a loader, an import, an await."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from meshbook import ProcMesh, errors, this_host
from meshbook.mesh.peeks import NoValue, Peeks, peek
from meshbook.mesh.proc_view import ask
from meshbook.mesh.states import type_line
from meshbook.wire.messages import AtPrompt


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcMesh]:
    """One rank, whose cells run while ``goes_on()``; see `_running`."""
    END.append(tmp_path_factory.mktemp("cells") / "end")
    with this_host().spawn_procs({"gpus": 1}, name="place") as mesh:
        goes_on = f"builtins.goes_on = lambda: not os.path.exists({str(END[0])!r})"
        mesh.run(f"import builtins, os, time, threading, asyncio, signal, ctypes\n{goes_on}").get(30)
        yield mesh


END: list[Path] = []


@contextmanager
def _running(mesh: ProcMesh, cell: str) -> Iterator[Any]:
    """Run a cell and give it time to come to its place; it ends when the block does."""
    END[0].unlink(missing_ok=True)
    running = mesh.run(cell)
    wait_until(lambda: mesh.status()[0].busy_s >= 0.5)
    yield running
    assert not running.done(), "the cell ended too early to be peeked into"
    END[0].touch()
    running.get(60)


def _only(peeks: Peeks) -> Any:
    return peeks.values.get(0)


LOCKED = """
lock = threading.Lock()
with lock:
    while goes_on(): pass
"""


def test_beside_a_lock_that_the_main_thread_holds(one: ProcMesh) -> None:
    with _running(one, LOCKED):
        assert _only(peek(one, "lock.locked()")) is True
        failure = peek(one, "lock.acquire()", timeout_s=0.3).failures[0]
        assert failure.ename == "TimeoutError" and "<expression>" in "".join(failure.traceback)
    assert one.evaluate("lock.locked()").get(30).values() == [False]


def test_while_the_main_thread_waits_for_a_lock(one: ProcMesh) -> None:
    one.run("def release():\n    while goes_on(): time.sleep(0.01)\n    held.set()").get(30)
    waiting = "held = threading.Event(); threading.Thread(target=release).start(); n = 5; held.wait()"
    with _running(one, waiting):
        peeks = peek(one, "n")
        assert _only(peeks) == 5 and peeks.places[0] == "a cell, line 1"


DELETED = """
class Slow:
    def __del__(self):
        while goes_on(): pass
n = 6
slow = Slow()
del slow
"""


def test_in_a_finalizer(one: ProcMesh) -> None:
    with _running(one, DELETED):
        peeks = peek(one, "n")
        assert _only(peeks) == 6 and peeks.places[0] == "a cell, line 4"


LOADED = """
class Slowly(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        while goes_on(): time.sleep(0.01)
        return index
n = 0
for batch in torch.utils.data.DataLoader(Slowly(), num_workers=1):
    n += int(batch)
"""


def test_while_a_loader_waits_for_its_workers(one: ProcMesh) -> None:
    with _running(one, LOADED):
        assert [_only(peek(one, "n")) for _ in range(5)] == [0] * 5
    assert one.evaluate("n").get(30).values() == [6]


def test_during_an_import_and_of_the_module_that_is_imported(one: ProcMesh, tmp_path: Path) -> None:
    (tmp_path / "imported_slowly.py").write_text("half = 1\nwhile goes_on(): pass\nwhole = 1\n")
    with _running(one, f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import imported_slowly"):
        assert _only(peek(one, "__import__('imported_slowly').half")) == 1
        assert peek(one, "__import__('imported_slowly').whole").failures[0].ename == "AttributeError"


def test_while_a_cell_awaits(one: ProcMesh) -> None:
    with _running(one, "n = 7\nwhile goes_on(): await asyncio.sleep(0.01)"):
        peeks = peek(one, "n")
        assert _only(peeks) == 7 and peeks.places[0] == "a cell, line 2"


def test_at_a_prompt_of_pdb(one: ProcMesh) -> None:
    running = one.run("n = 9\nfor step in range(10**9): pass")
    wait_until(lambda: one.status()[0].busy_s >= 0.3)
    ask(one, str, "pdb_break_in")
    while not (prompts := {rank: at.number for rank, at in ask(one, AtPrompt, "pdb_prompt").items()}):
        time.sleep(0.02)
    peeks = peek(one, "n")
    assert _only(peeks) == 9 and "a cell, line 2" in peeks.places[0]
    type_line(one, "step = 0; import sys; sys.settrace(None)", prompts)
    assert peek(one, "breakpoint()").failures[0].ename == "UsageError"
    running.interrupt()  # type: ignore[attr-defined]


def test_modules_of_ddp_are_looked_into_without_gradients(one: ProcMesh) -> None:
    one.run("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1)); x = torch.ones(2, 4)").get(60)
    steps = "while goes_on():\n    loss = model(x).sum()\n    time.sleep(0.002)\n    loss.backward()"
    with _running(one, steps):
        for _ in range(20):
            assert _only(peek(one, "model(x).requires_grad")) is False
        assert _only(peek(one, "torch.nn.functional.linear(x, model.module.weight).shape")) == (2, 1)


def test_a_handler_of_the_users_is_not_called(one: ProcMesh) -> None:
    handled = "pressed = []; signal.signal(signal.SIGINT, lambda *_: pressed.append(1))\n"
    with _running(one, handled + "while goes_on(): time.sleep(0.01)"):
        assert [_only(peek(one, "pressed")) for _ in range(5)] == [[]] * 5
    with _running(one, handled + "ctypes.CDLL(None).sleep(3)\nwhile goes_on(): time.sleep(0.01)"):
        assert "a cell, line 2" in _only(peek(one, "pressed")).why
    assert one.evaluate("pressed").get(30).values() == [[]]


def test_an_expression_that_catches_everything_ends_all_the_same(one: ProcMesh) -> None:
    one.run(
        "def stubborn():\n    while True:\n        try:\n            while True: time.sleep(0.01)\n"
        "        except BaseException as error:\n            if len(caught := [*caught_so_far, error]) > 2: raise\n"
        "            caught_so_far[:] = caught\ncaught_so_far = []"
    ).get(30)
    with _running(one, "while goes_on(): time.sleep(0.01)"):
        assert peek(one, "stubborn()", timeout_s=0.3).failures[0].ename == "TimeoutError"


def test_native_code_in_an_expression_is_reported_and_the_cell_goes_on(one: ProcMesh) -> None:
    one.run("import hashlib; native = ctypes.CDLL(None).usleep").get(30)
    with _running(one, "n = 8\nwhile goes_on(): pass"):
        pauses = "[native(100_000) for _ in range(20)]"  # a signal ends the first one at most
        assert peek(one, pauses, timeout_s=0.2).failures[0].ename == "TimeoutError"
        derived = peek(one, "hashlib.pbkdf2_hmac('sha256', b'key', b'salt', 3_000_000)", timeout_s=0.1)
        assert "native code in the expression" in _only(derived).why
    assert one.evaluate("n").get(60).values() == [8]


def test_torch_is_not_looked_into_while_it_records(one: ProcMesh) -> None:
    one.run("from torch._subclasses.fake_tensor import FakeTensorMode; FakeTensorMode()").get(60)
    with _running(one, "with FakeTensorMode():\n    while goes_on(): pass"):
        assert isinstance(_only(peek(one, "torch.ones(1)")), NoValue)


def test_two_peeks_at_a_time_both_answer(one: ProcMesh) -> None:
    with _running(one, "while goes_on(): pass"):
        looks = [one.evaluate(f"(time.sleep(0.02), {n})[1]", now=True, timeout_s=20) for n in range(4)]
        assert [each.get(60).values() for each in looks] == [[n] for n in range(4)]


def test_what_it_prints_is_output_of_the_cell(one: ProcMesh, capfd: pytest.CaptureFixture[str]) -> None:
    with _running(one, "while goes_on(): time.sleep(0.01)"):
        assert _only(peek(one, "print('seen')")) is None
        wait_until(lambda: "seen" in capfd.readouterr().out)


def test_large_values_and_those_that_cannot_travel_are_described(one: ProcMesh) -> None:
    for expression, says in (("bytes(20 << 20)", "bytes kept on rank 0"), ("threading.Lock()", "lock kept on rank 0")):
        assert says in repr(_only(peek(one, expression)))
    assert len(_only(peek(one, "torch.zeros(3 << 20)"))) == 3 << 20


def test_ranks_of_two_hosts_and_of_a_part(mesh2x2: ProcMesh) -> None:
    running = mesh2x2.run("import time\nuntil = time.time() + 2\nwhile time.time() < until: pass")
    assert peek(mesh2x2, "rank").values.values() == [0, 1, 2, 3]
    assert peek(mesh2x2.slice(hosts=1), "rank").values.values() == [2, 3]
    running.get(30)


def test_a_rank_without_torch() -> None:
    with this_host().spawn_procs({"gpus": 1}, name="plain", torch=False) as mesh:
        assert _only(peek(mesh, "(n := 3) + rank")) == 3


@pytest.mark.parametrize("timeout_s", [0, -1, 61, float("nan")])
def test_a_time_that_makes_no_sense_is_refused(one: ProcMesh, timeout_s: float) -> None:
    with pytest.raises(errors.UsageError, match="more than 0 s"):
        peek(one, "rank", timeout_s)


def test_a_stopped_mesh_says_so() -> None:
    mesh = this_host().spawn_procs({"gpus": 1}, name="gone")
    mesh.stop()
    with pytest.raises(errors.MeshStoppedError):
        peek(mesh, "rank")
