"""A start that makes progress is waited for, however long it takes; one that stops moving is given up in words."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from meshbook import ProcMesh, start_hosts, this_host
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.base import LaunchedHost
from meshbook.launchers.local import LocalLauncher
from meshbook.mesh.driven import set_front_end
from meshbook.wire.ticket import Ticket

COMPUTES = "import time\nend = time.process_time() + 3\nwhile time.process_time() < end: pass\n"
HANGS = "import time\nprint('waiting for the share', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "computing_module.py").write_text(COMPUTES)
    (tmp_path / "hanging_module.py").write_text(HANGS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def shown() -> Iterator[list[str]]:
    texts: list[str] = []
    set_front_end(show_progress=texts.append)
    yield texts
    set_front_end()


@pytest.mark.slow
@pytest.mark.usefixtures("modules")
def test_importing_is_progress_and_is_shown(shown: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=("computing_module",), torch=False, within_s=1.5) as mesh:
        assert mesh.run("import sys; 'computing_module' in sys.modules").get(60).values() == [True, True]
    assert any(text.startswith("importing computing_module, ") for text in shown), shown
    assert shown[-1] == ""


@pytest.mark.slow
@pytest.mark.usefixtures("modules")
def test_an_import_that_has_stopped_moving_is_an_error_that_names_it() -> None:
    with this_host().spawn_procs({"gpus": 1}, torch=False), pytest.raises(SpawnError) as caught:
        this_host().spawn_procs({"gpus": 2}, preload=("hanging_module",), torch=False, within_s=3)
    first, last_line, where = str(caught.value).splitlines()
    assert first == "no progress for 3 s while importing hanging_module: ranks 0,1 have not answered"
    assert last_line == "  the last line of the log: waiting for the share"
    assert where.endswith("give it longer: within_s=600")


class StoppedLauncher(LocalLauncher):
    """Stops the hosts that it starts before they dial in."""

    def launch(self, tickets: Sequence[Ticket]) -> list[LaunchedHost]:
        started = super().launch(list(tickets))
        for host in started:
            os.kill(host.pid, signal.SIGSTOP)
        return started


def test_hosts_that_do_not_dial_in_are_named() -> None:
    hosts = start_hosts({"hosts": 2}, StoppedLauncher(separate_hosts=True))
    said = r"no progress for 1 s while waiting for host 1 of 2; 0 of 2 hosts are there: host 1 of 2 has not dialled in"
    with pytest.raises(SpawnError, match=said):
        hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, within_s=1)


def test_ranks_that_come_later_have_so_long_too(mesh4: ProcMesh) -> None:
    for act in (mesh4.heal, mesh4.grow, lambda **more: mesh4.respawn(0, **more)):
        with pytest.raises(UsageError, match="a number of seconds above 0, not within_s=0"):
            act(within_s=0)
    with this_host().spawn_procs({"gpus": 1}, torch=False) as mesh:
        mesh._mesh.recipe = mesh._mesh.recipe._replace(preload=("no_such_share",))
        with pytest.raises(SpawnError, match="No module named 'no_such_share'"):
            mesh.grow(gpus=1, within_s=30)
        assert mesh.run("rank").get(30).values() == [0]
