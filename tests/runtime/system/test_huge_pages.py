"""Memory in huge pages: what is this process's alone is moved there, and a template with spare time does it."""

from __future__ import annotations

import mmap
import os
import platform
import re
from pathlib import Path

import pytest
from patience import wait_until
from template_processes import torch_templates_of

from meshbook import LocalLauncher, start_hosts
from meshbook.system.memory_files import PIECE_BYTES, use_huge_pages

SIZE_BYTES = 3 * PIECE_BYTES
RELEASE = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])

pytestmark = [
    pytest.mark.skipif(
        RELEASE < (6, 1) or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no way to"
    ),
    pytest.mark.usefixtures("no_lasting_template"),
]


def _in_huge_pages(pid: int | str = "self") -> int:
    """Bytes of the process's memory."""
    return sum(
        int(kb) << 10 for kb in re.findall(r"AnonHugePages: *(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    )


def _mapped(share: float) -> mmap.mmap:
    """Memory of which a part is written to."""
    mapped = mmap.mmap(-1, SIZE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, int(share * SIZE_BYTES), mmap.PAGESIZE):
        mapped[at] = 7
    return mapped


def test_memory_that_is_there_is_moved_and_keeps_its_content() -> None:
    before = _in_huge_pages()
    with _mapped(1.0) as mapped:
        steps = sum(1 for _ in use_huge_pages())
        assert steps >= SIZE_BYTES // PIECE_BYTES
        assert _in_huge_pages() - before >= SIZE_BYTES // 2
        assert mapped[:: mmap.PAGESIZE] == b"\7" * (SIZE_BYTES // mmap.PAGESIZE)


def test_memory_that_is_hardly_used_or_shared_is_left() -> None:
    for _ in use_huge_pages():  # what others have left
        pass
    before = _in_huge_pages()
    with _mapped(0.1), _mapped(1.0):
        wait_read, wait_write = os.pipe()
        if (child := os.fork()) == 0:
            os.close(wait_write)
            os.read(wait_read, 1)
            os._exit(0)
        try:
            for _ in use_huge_pages():
                pass
            assert _in_huge_pages() - before < SIZE_BYTES // 2
        finally:
            os.close(wait_read)
            os.close(wait_write)
            os.waitpid(child, 0)


@pytest.mark.slow
def test_a_template_that_nobody_asks_for_anything_does_it() -> None:
    hosts = start_hosts({}, LocalLauncher())
    hosts.spawn_procs({"gpus": 1}, group=False, device="cpu").stop().get(60)
    agent = hosts._hosts[0].present().hello
    assert agent is not None
    (template,) = torch_templates_of(agent.pid, ())
    wait_until(lambda: _in_huge_pages(template.pid) > 100 << 20, timeout_s=60)
    with hosts.spawn_procs({"gpus": 2}, group=False, device="cpu", owns_hosts=True) as mesh:
        assert sum(mesh.execute(os.getpgid, 0).get(60).values()) > 0
