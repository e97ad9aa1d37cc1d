"""Holes of the C heap are filled: what is allocated next lies behind everything."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap

import pytest

HOLES = """
    import ctypes
    from meshbook.system.heap_holes import fill_heap_holes
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(600) for _ in range(2001)]
    for block in blocks[1:2000:2]:
        libc.free(block)
    last = max(blocks)
    def behind():
        asked = [libc.malloc(600) for _ in range(200)]
        for block in asked:
            libc.free(block)
        return sum(block > last for block in asked)
    before = behind()
    print(before, fill_heap_holes() > 500 * 600, fill_heap_holes() < 10_000, behind())
"""


def test_what_is_allocated_after_it_lies_behind_all_others() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("this C library does not tell of its heap")
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HOLES)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    before, *filled, after = ran.stdout.split()
    assert filled == ["True", "True"] and int(before) < 100 and int(after) > 180, ran.stdout


def test_a_c_library_that_tells_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshbook.system import heap_holes

    monkeypatch.setattr(heap_holes, "_libc", object())
    assert heap_holes.fill_heap_holes() == 0
