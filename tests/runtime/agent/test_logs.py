"""Logs of ranks are read where they lie, as they grow."""

from __future__ import annotations

import os
import platform
import shutil
import time
from pathlib import Path

import pytest

from meshbook.agent.rank_log import RankLog, read_on, settle_logs
from meshbook.controller.queries import LogFollower
from meshbook.errors import SpawnError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.states import follow_logs
from meshbook.sessions import folder as session_folder
from meshbook.sessions.folder import SessionFolder
from meshbook.system.exits import log_tail
from meshbook.system.user_folders import write_private
from meshbook.wire.messages import FROM_THE_END, LogPiece, ReadOn


def _asked(*offsets: tuple[int, int], lines: int = 2, limit_bytes: int = 20) -> ReadOn:
    return ReadOn(offsets, lines, limit_bytes)


def test_a_log_is_read_on_from_an_offset_and_only_where_there_is_more(tmp_path: Path) -> None:
    paths = {rank: tmp_path / f"{rank}.log" for rank in (0, 1)}
    paths[0].write_text("one\ntwo\nthree\n")
    assert read_on(paths, _asked((0, FROM_THE_END), (1, FROM_THE_END), (7, 0))) == (
        LogPiece(0, b"two\nthree\n", 14, 0),
    )
    assert read_on(paths, _asked((0, 14))) == ()
    with paths[0].open("a") as file:
        file.write("four\nfi")
    assert read_on(paths, _asked((0, 14))) == (LogPiece(0, b"four\nfi", 21, 0),)


def test_of_a_log_that_grew_by_much_the_newest_whole_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number:04}\n" for number in range(100)))
    (piece,) = read_on({0: log}, _asked((0, 10)))
    assert piece == LogPiece(0, b"line 0099\n", 1000, 980)
    (anew,) = read_on({0: log}, _asked((0, 5000), limit_bytes=2000))
    assert len(anew.data) == 1000 and anew.skipped_bytes == 0


def test_lines_are_chosen_by_their_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("loss 1\nother\nloss 2\nloss 3\n")
    assert log_tail(log, 2, containing="loss") == "loss 2\nloss 3"
    assert log_tail(log, 0) == ""


def test_of_a_progress_bar_its_last_state_is_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"begin\r\n\r  0%\r 50%\r100%\nend\n\r 10%\r 20%")
    assert log_tail(log, 9) == "begin\n100%\nend\n 20%"


def _follow_until(follower: LogFollower, wanted: str) -> str:
    """What is new until ``wanted`` has come."""
    text, deadline = "", time.monotonic() + 20
    while wanted not in text:
        assert time.monotonic() < deadline, text
        text += "".join(f"[{rank}]{piece}" for rank, piece, _ in follower.look())
    return text


def test_what_ranks_write_is_followed_on_every_host_while_they_run(mesh2x2: ProcMesh) -> None:
    follower = follow_logs(mesh2x2, lines=0)
    assert follower.look() == []
    future = mesh2x2.run("import time\nfor i in range(3): print('hallo, Wörld', rank, i); time.sleep(0.05)")
    text = _follow_until(follower, "hallo, Wörld 3 2")
    future.get(30)
    text += "".join(f"[{rank}]{piece}" for rank, piece, _ in follower.look())
    assert all(f"hallo, Wörld {rank} 2\n" in text for rank in range(4))
    assert follower.look() == []


def test_the_last_words_of_a_rank_that_died_can_be_followed(mesh2: ProcMesh) -> None:
    follower = follow_logs(mesh2.slice(gpus=1))
    mesh2.run("import os\nif rank == 1:\n    print('good', 'bye', flush=True); os._exit(3)").exception(30)
    assert "[1]good bye\n" in _follow_until(follower, "good bye\n")
    assert mesh2.logs(1)[1] == "good bye"


def test_logs_of_ended_sessions_are_kept_within_bounds_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(session_folder, "KEPT_LOG_BYTES", 1 << 20)

    def begin(size_bytes: int) -> SessionFolder:
        folder = SessionFolder.create("", "", 5.0)
        (folder.logs / "mesh").mkdir()
        (folder.logs / "mesh" / "rank-0.log").write_bytes(bytes(size_bytes))
        now = time.time() + len(begun)
        os.utime(folder.logs, (now, now))
        begun.append(folder)
        return folder

    begun: list[SessionFolder] = []
    sizes = [600_000, 10_000, 400_000, 3_000_000, 500_000]
    for number, size_bytes in enumerate(sizes):
        folder = begin(size_bytes)
        if number != 3:  # which goes on: it is not counted
            folder.close()
    begin(0).close()
    assert [folder.logs.exists() for folder in begun] == [False, True, True, True, True, True]
    begun[3].close()
    begin(2_000_000).close()
    begin(0).close()
    assert [folder.logs.exists() for folder in begun] == [False] * 6 + [True, True]


def test_logs_of_a_living_session_stay_wherever_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the same home see another runtime folder, or are another machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(session_folder, "KEPT_LOG_SESSIONS", 1)
    folders = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / place))
        folders.append(SessionFolder.create("public", "secret", 60.0))
    living, other = folders
    (unknown := living.logs.parent / "unknown").mkdir()
    (foreign := living.logs.parent / "foreign").mkdir()
    write_private(foreign / "session", b'["another machine", "its boot", "/run/its/session"]')

    def trim() -> list[bool]:
        SessionFolder.create("public", "secret", 60.0).close()
        SessionFolder.create("public", "secret", 60.0).close()
        return [each.exists() for each in (living.logs, unknown, foreign)]

    assert trim() == [True] * 3
    for each, days in ((unknown, 8), (foreign, 8)):
        for path in (*each.iterdir(), each):
            os.utime(path, (time.time() - days * 86400,) * 2)
    assert trim() == [True, False, True]
    living.close()
    assert trim() == [False, False, True]
    other.close()


def test_a_session_that_cannot_be_taken_over_can_be_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = SessionFolder.create("public", "secret", 60.0)
    folder.leave()
    folder.logs.chmod(0o777)
    with pytest.raises(SpawnError, match="0700"):
        SessionFolder.take_over(folder.path)
    folder.logs.chmod(0o755)
    taken = SessionFolder.take_over(folder.path)
    assert taken is not None and taken.logs.stat().st_mode & 0o777 == 0o700
    taken.close()


def test_logs_that_another_session_removes_meanwhile_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "ended" / name).mkdir(parents=True)
        (tmp_path / "ended" / name / "rank0.log").write_text("x")
    write_private(tmp_path / "ended" / "session", f'["{platform.node()}", "an earlier boot", ""]'.encode())

    def remove_all(path: Path) -> int:
        shutil.rmtree(tmp_path / "ended", ignore_errors=True)
        return 1

    monkeypatch.setattr(session_folder, "_size_bytes", remove_all)
    session_folder.trim_logs(tmp_path)
    assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_agent_that_ends_waits_for_its_logs_and_no_longer(tmp_path: Path, is_closed: bool) -> None:
    log = RankLog(tmp_path / "log")
    log.write(b"the last words\n", time.monotonic())
    if is_closed:
        log.close()
    began = time.monotonic()
    settle_logs(10.0)
    assert time.monotonic() - began < 5
    assert (tmp_path / "log").read_bytes() == b"the last words\n"
    if not is_closed:
        log.close()
