"""Payloads in shared memory, between real processes."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from meshbook.errors import LocalProtocolError, MeshError
from meshbook.system.memory_files import join_mapped
from meshbook.values.pickling import dumps, loads
from meshbook.values.segments import (
    COPY_MAX_BYTES,
    KEPT_MAX,
    MAX_IDLE,
    PAGE_BYTES,
    KeptMappings,
    SegmentPool,
    map_segment,
)
from meshbook.wire.messages import SegmentRef

LARGE = COPY_MAX_BYTES + 1
"""Bytes of a payload that is mapped; up to COPY_MAX_BYTES it is copied."""

PEER = """
import ast, sys
from meshbook.values.segments import SegmentPool, map_segment
from meshbook.wire.messages import SegmentRef
names = dict(globals(), released=[])
for line in sys.stdin:
    code = ast.literal_eval(line)
    try:
        mode = "exec" if " = " in code or "; " in code or code.startswith(("del ", "import ")) else "eval"
        answer = eval(compile(code, "peer", mode), names)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(repr(answer), flush=True)
"""


class Peer:
    """Another process, that does what it is told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, code: str) -> Any:
        """Run ``code`` there; return the value of an expression, or the text of what it raised."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{code!r}\n")
        self.process.stdin.flush()
        return ast.literal_eval(self.process.stdout.readline())

    def map(self, ref: SegmentRef) -> Any:
        return self.do(f"views = map_segment(SegmentRef(*{tuple(ref)!r}), released.append)")

    def end(self) -> str:
        """Let it leave by itself; return what it still says."""
        return self.process.communicate(timeout=20)[0]


@pytest.fixture
def start_peer() -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield start
    for peer in peers:
        peer.process.kill()
        peer.process.communicate()


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool()
    yield pool
    pool.close()


@pytest.fixture
def released() -> list[int]:
    return []


def random_bytes(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- what arrives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES, COPY_MAX_BYTES, LARGE, 3 * LARGE])
def test_buffers_arrive_whole_and_on_pages(pool: SegmentPool, released: list[int], size: int) -> None:
    buffers = [random_bytes(size), b"", random_bytes(7), np.arange(30.0).reshape(5, 6), bytearray(3)]
    ref = pool.write(buffers)
    views = map_segment(ref, released.append)
    assert [view.tobytes() for view in views] == [memoryview(buffer).tobytes() for buffer in buffers]
    assert all(offset % PAGE_BYTES == 0 for offset, _ in ref.spans)
    assert all(view.flags.writeable for view in views)


def test_each_payload_of_a_reused_segment_arrives_whole(pool: SegmentPool, released: list[int]) -> None:
    for size in (LARGE, 10, 2 * LARGE, LARGE, 3 * LARGE, 3 * LARGE):
        buffers = [random_bytes(size), random_bytes(size // 2)]
        ref = pool.write(buffers)
        views = map_segment(ref, released.append)
        assert all(np.array_equal(view, buffer) for view, buffer in zip(views, buffers, strict=True))
        del views
        pool.release(ref.segment)


def test_another_process_reads_the_payload(pool: SegmentPool, start_peer: Callable[[], Peer]) -> None:
    peer = start_peer()
    for size in (100, LARGE):
        assert peer.map(pool.write([np.full(size, 7, np.uint8), b"end"])) is None
        assert peer.do("[len(views[0]), int(views[0].min()), views[1].tobytes()]") == [size, 7, b"end"]


@pytest.mark.quick("1048577")
@pytest.mark.parametrize("size", [100, LARGE])
def test_what_a_receiver_writes_stays_its_own(
    pool: SegmentPool, released: list[int], start_peer: Callable[[], Peer], size: int
) -> None:
    ref = pool.write([np.ones(size, np.uint8)])
    writer, reader = start_peer(), start_peer()
    for peer in (writer, reader):
        peer.map(ref)
    writer.do("views[0].__setitem__(slice(None), 9)")
    assert writer.do("int(views[0].min())") == 9
    assert reader.do("int(views[0].max())") == 1
    (mine,) = map_segment(ref, released.append)
    assert mine.max() == 1


def test_a_mapping_outlives_its_owner(start_peer: Callable[[], Peer], released: list[int]) -> None:
    owner = start_peer()
    owner.do("pool = SegmentPool()")
    ref = SegmentRef(*owner.do(f"tuple(pool.write([bytes([5]) * {LARGE}]))"))
    (view,) = map_segment(ref, released.append)
    owner.process.kill()
    owner.process.wait()
    assert view.min() == view.max() == 5


@pytest.mark.parametrize("size", [LARGE, 4 * LARGE])
def test_tensors_and_arrays_use_the_mapping_in_place_and_keep_it(
    pool: SegmentPool, released: list[int], size: int
) -> None:
    sent = {"tensor": torch.arange(size), "array": np.arange(size), "model": torch.nn.Linear(size, 1)}
    pickled = dumps(sent, what="x")
    head, buffers = pickled.head, pickled.buffers
    ref = pool.write(buffers)
    assert len(head) < 5000
    loaded = loads(head, map_segment(ref, released.append))
    gc.collect()
    loaded["tensor"] += 1
    loaded["array"] += 1
    loaded["model"].weight.data.zero_()
    assert torch.equal(loaded["tensor"], sent["tensor"] + 1)
    assert np.array_equal(loaded["array"], sent["array"] + 1)
    assert sent["model"].weight.abs().max() > 0
    for name in ("tensor", "array"):
        del loaded[name]
        gc.collect()
        assert not released
    part = loaded.pop("model").weight.data[0, :3]
    gc.collect()
    assert not released and part.max() == 0
    del part
    gc.collect()
    assert released == [ref.segment]


def laid_out(pool: SegmentPool, sizes: list[int], on_release: Callable[[int], None]) -> list[Any]:
    refs = [pool.write([random_bytes(size)], position) for position, size in enumerate(sizes)]
    return [map_segment(ref, on_release)[0] for ref in refs]


@pytest.mark.parametrize("size", [2 * LARGE + 1, 512 * PAGE_BYTES, 2 * LARGE + PAGE_BYTES - 1])
def test_pieces_are_joined_without_a_copy(pool: SegmentPool, released: list[int], size: int) -> None:
    pieces = laid_out(pool, [size] * 5, released.append)
    expected = np.concatenate(pieces)
    joined = join_mapped(pieces)
    assert joined is not None and np.array_equal(joined, expected)
    assert [np.array_equal(piece, expected[:size]) for piece in pieces] == [True] * 5
    joined[:] = 7  # ours alone
    assert [piece.max() for piece in pieces] == [expected.max()] * 5
    again = join_mapped(pieces)
    assert again is not None and np.array_equal(again, expected)
    part = joined[3 * size :]
    del pieces, joined, again
    gc.collect()
    assert not released and part.max() == 7
    del part
    gc.collect()
    assert sorted(released) == sorted(pool.in_use)


def test_what_lies_otherwise_is_not_joined(pool: SegmentPool, released: list[int]) -> None:
    assert join_mapped(laid_out(pool, [2 * LARGE, 2 * LARGE + 1, 2 * LARGE], released.append)) is None
    ours = [np.zeros(16 * PAGE_BYTES, np.uint8)[:PAGE_BYTES] for _ in range(2)]
    assert join_mapped(ours) is None
    assert join_mapped([*laid_out(pool, [512 * PAGE_BYTES], released.append), ours[0]]) is None
    gc.collect()
    assert sorted(released) == sorted(pool.in_use)


# ---- release -----------------------------------------------------------------------------------------------


def test_release_is_called_once_when_the_last_view_has_died(pool: SegmentPool, released: list[int]) -> None:
    ref = pool.write([bytes(LARGE), bytes(10)])
    views = map_segment(ref, released.append)
    last = memoryview(views[1][3:])
    del views
    gc.collect()
    assert not released
    del last
    gc.collect()
    assert released == [ref.segment]


def test_a_small_payload_is_released_at_once(pool: SegmentPool, released: list[int]) -> None:
    ref = pool.write([bytes(COPY_MAX_BYTES)])
    views = map_segment(ref, released.append)
    assert released == [ref.segment]
    pool.release(ref.segment)
    pool.write([bytes([1]) * COPY_MAX_BYTES])
    assert views[0].max() == 0
    del views
    gc.collect()
    assert released == [ref.segment]


def test_a_small_payload_is_what_its_memory_holds_now_and_belongs_to_its_receiver(
    pool: SegmentPool, released: list[int]
) -> None:
    views, kept = [], KeptMappings()
    for value in range(5):  # one segment, whose mapping is kept after the first
        ref = pool.write([np.full(COPY_MAX_BYTES - value, value, np.uint8)])
        views += map_segment(ref, released.append, kept)
        pool.release(ref.segment)
    assert [set(view.tolist()) for view in views] == [{value} for value in range(5)]
    views[0][:] = 9
    assert views[1].max() == 1
    assert len(released) == 5


@pytest.mark.parametrize("reused", [False, True], ids=["closed", "reused"])
def test_a_small_payload_whose_memory_was_mapped_before_and_is_gone(released: list[int], reused: bool) -> None:
    pool, later, kept = SegmentPool(), SegmentPool(), KeptMappings()
    ref = pool.write([b"one"])
    map_segment(ref, released.append, kept)
    pool.close()
    try:
        if not reused:
            with pytest.raises(MeshError, match=r"is gone: process \d+ has freed it"):
                map_segment(ref, released.append, kept)
            return
        again = later.write([b"two"])
        assert again.fd == ref.fd
        assert map_segment(again, released.append, kept)[0].tobytes() == b"two"
    finally:
        later.close()


def test_mappings_of_small_payloads_are_bounded(released: list[int]) -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum(f"memfd:meshbook-{os.getpid()}" in line and " r--s " in line for line in maps)

    pool, kept = SegmentPool(), KeptMappings()
    refs = [pool.write([bytes([number])]) for number in range(KEPT_MAX + 5)]
    for _ in range(2):
        assert [map_segment(ref, released.append, kept)[0][0] for ref in refs] == list(range(KEPT_MAX + 5))
    assert mappings() == KEPT_MAX
    pool.close()


def test_each_receiver_releases_for_itself(pool: SegmentPool, start_peer: Callable[[], Peer]) -> None:
    ref = pool.write([bytes(LARGE)])
    peers = [start_peer(), start_peer()]
    for peer in peers:
        peer.map(ref)
    peers[0].do("del views")
    assert [peer.do("released") for peer in peers] == [[ref.segment], []]


def test_a_fork_releases_nothing(pool: SegmentPool, start_peer: Callable[[], Peer]) -> None:
    ref = pool.write([bytes(LARGE)])
    peer = start_peer()
    peer.map(ref)
    peer.do("import os")
    fork = "pid = os.fork()\nif not pid:\n    del views\n    os._exit(len(released))"
    peer.do(fork)
    assert peer.do("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == 0
    peer.do("del views")
    assert peer.do("released") == [ref.segment]


def test_a_process_that_ends_calls_nobody(pool: SegmentPool, start_peer: Callable[[], Peer]) -> None:
    ref = pool.write([bytes(LARGE)])
    peer = start_peer()
    peer.do(f"views = map_segment(SegmentRef(*{tuple(ref)!r}), lambda segment: print('released', flush=True))")
    assert peer.end() == ""
    assert peer.process.returncode == 0


# ---- the pool ----------------------------------------------------------------------------------------------


def test_a_segment_is_not_written_again_before_its_release(pool: SegmentPool) -> None:
    first, second = pool.write([bytes(LARGE)]), pool.write([bytes(LARGE)])
    assert first.fd != second.fd
    pool.release(first.segment)
    third = pool.write([bytes(LARGE)])
    assert third.fd == first.fd
    assert len({first.segment, second.segment, third.segment}) == 3
    assert pool.in_use == (second.segment, third.segment)


def test_a_second_release_does_not_free_the_next_payload(pool: SegmentPool) -> None:
    first = pool.write([bytes(LARGE)])
    pool.release(first.segment)
    second = pool.write([bytes(LARGE)])
    pool.release(first.segment)
    assert pool.in_use == (second.segment,)


def test_the_smallest_warm_segment_that_fits_is_taken(pool: SegmentPool) -> None:
    sizes = [8 * LARGE, 2 * LARGE, 4 * LARGE]
    refs = [pool.write([bytes(size)]) for size in sizes]
    for ref in refs:
        pool.release(ref.segment)
    assert pool.write([bytes(3 * LARGE)]).fd == refs[2].fd
    assert pool.write([bytes(2 * LARGE)]).fd == refs[1].fd
    assert pool.write([bytes(10)]).fd != refs[0].fd  # it would hold eight million for ten


def test_what_is_kept_warm_is_bounded_and_the_oldest_goes_first() -> None:
    pool = SegmentPool(capacity_bytes=5 << 20)
    try:
        refs = [pool.write([bytes(2 << 20)]) for _ in range(4)]
        assert pool.idle_bytes == 0
        for ref in refs:
            pool.release(ref.segment)
        assert pool.idle_bytes == 4 << 20
        kept = {pool.write([bytes(2 << 20)]).fd for _ in range(2)}
        assert kept == {refs[2].fd, refs[3].fd}
        large = pool.write([bytes(6 << 20)])
        pool.release(large.segment)
        assert pool.idle_bytes <= 5 << 20
    finally:
        pool.close()


def test_few_file_descriptors_stay_open(pool: SegmentPool, released: list[int]) -> None:
    before = open_descriptors()
    views = []
    for _ in range(2 * MAX_IDLE):
        views.append(map_segment(pool.write([bytes(LARGE)]), released.append))
    assert open_descriptors() == before + 2 * MAX_IDLE  # the owner's; receivers hold none
    for segment in pool.in_use:
        pool.release(segment)
    assert open_descriptors() == before + MAX_IDLE
    pool.close()
    assert open_descriptors() == before
    assert views[0][0].max() == 0


def test_a_failed_write_leaves_nothing_in_use(pool: SegmentPool) -> None:
    with pytest.raises(BufferError, match="contiguous"):
        pool.write([memoryview(np.arange(100)[::2])])
    assert not pool.in_use


def test_a_closed_pool_refuses_and_ignores_late_releases() -> None:
    pool = SegmentPool()
    ref = pool.write([b"abc"])
    pool.close()
    pool.close()
    pool.release(ref.segment)
    with pytest.raises(LocalProtocolError, match="closed"):
        pool.write([b"abc"])


def test_threads_and_the_garbage_collector_may_release(pool: SegmentPool) -> None:
    def use(value: int) -> None:
        for _ in range(50):
            ref = pool.write([np.full(LARGE, value, np.uint8)])
            (view,) = map_segment(ref, pool.release)
            assert view.min() == view.max() == value
            cycle: list[object] = [view]
            cycle.append(cycle)  # dies in a collection, wherever that happens

    threads = [threading.Thread(target=use, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not pool.in_use


# ---- what can go wrong -------------------------------------------------------------------------------------


def test_an_owner_that_has_ended_is_named(start_peer: Callable[[], Peer], released: list[int]) -> None:
    owner = start_peer()
    owner.do("pool = SegmentPool()")
    ref = SegmentRef(*owner.do(f"tuple(pool.write([bytes({LARGE})]))"))
    owner.process.kill()
    owner.process.wait()
    with pytest.raises(MeshError, match=rf"^a payload of 1\.05 MB .* is gone: process {ref.pid} has ended\.$"):
        map_segment(ref, released.append)
    assert released == [ref.segment]


@pytest.mark.parametrize("reused", [False, True], ids=["closed", "reused"])
def test_a_segment_that_was_freed_is_named(released: list[int], reused: bool) -> None:
    pool = SegmentPool()
    ref = pool.write([bytes(LARGE)])
    pool.close()
    ends = os.pipe() if reused else ()
    try:
        assert not reused or ref.fd in ends
        with pytest.raises(MeshError, match=r"is gone: process \d+ has freed it"):
            map_segment(ref, released.append)
    finally:
        for end in ends:
            os.close(end)
    assert released == [ref.segment]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_reads_nothing(pool: SegmentPool, start_peer: Callable[[], Peer]) -> None:
    peer = start_peer()
    peer.do("import os; os.setuid(65534)")
    said = peer.map(pool.write([b"secret"]))
    assert said.startswith("MeshError: ") and "run as different users" in said


def test_running_out_of_file_descriptors_says_what_to_do(start_peer: Callable[[], Peer]) -> None:
    peer = start_peer()
    peer.do("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); pool = SegmentPool()")
    said = peer.do("[pool.write([b'x']) for _ in range(30)]")
    assert said.startswith("MeshError: no shared memory for a payload of 1 B: too many open files (process ")
    assert "earlier payloads are still in use" in said and "ulimit -n" in said


def test_running_out_of_memory_says_so(start_peer: Callable[[], Peer]) -> None:
    peer = start_peer()
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    peer.do(f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); {limit}")
    peer.do("pool = SegmentPool()")
    said = peer.do(f"pool.write([bytes({4 * LARGE})])")
    assert said.startswith(
        "MeshError: no shared memory for a payload of 4.19 MB: file too large (the limit on the size of files"
    )
    assert peer.do("pool.in_use") == ()
