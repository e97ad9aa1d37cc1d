"""Ends of tunnels that nobody has removed go with the next agent, and no others."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshbook.agent import tunnel


@pytest.fixture
def end() -> Iterator[tuple[Path, socket.socket]]:
    """A socket that listens where sshd has its end of a tunnel."""
    path = Path(f"/tmp/meshbook-{os.urandom(12).hex()}")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        yield path, sock
    path.unlink(missing_ok=True)


def test_an_end_at_which_nobody_listens_goes_once_it_is_not_young(end: tuple[Path, socket.socket]) -> None:
    path, sock = end
    old = time.time() - 2 * tunnel.NEW_S
    os.utime(path, (old, old))
    tunnel.sweep()
    assert path.exists(), "somebody listens there"
    sock.close()
    os.utime(path)
    tunnel.sweep()
    assert path.exists(), "sshd may be about to listen"
    os.utime(path, (old, old))
    tunnel.sweep()
    assert not path.exists()


def test_a_file_of_such_a_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_ENDS", f"{tmp_path}/meshbook-*")
    (file := tmp_path / "meshbook-0").write_text("theirs")
    os.utime(file, (0, 0))
    tunnel.sweep()
    assert file.exists()
