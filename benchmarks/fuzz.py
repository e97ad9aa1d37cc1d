"""Does any input bring the controller down, cost it memory or descriptors, or reach a pickle?

    python -m benchmarks.fuzz [--frames N] [--handshakes N] [--seed N]

Three parts, each in this process on the real classes:

    decoders      mutated messages into the codecs, the link layer and the batches
    authenticated the same, from a peer with a valid key over a real ROUTER into a real switchboard
    strangers     handshakes that lead nowhere, from many loopback addresses, at a real TCP port

Every frame may be refused by DecodeError or ProtocolError and by nothing else. The report says how many there were, how
many were refused, and what memory and descriptors did from the first tenth to the end. Exit code 1 if anything else
was raised, a canary was unpickled, or memory or descriptors grew.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import pickle
import random
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import zmq

from meshbook.calls.call import OpenCall
from meshbook.concurrency import background
from meshbook.concurrency.future import Future
from meshbook.controller.dispatcher import Dispatcher
from meshbook.controller.host_state import HostState
from meshbook.controller.io_turns import TurnQueue
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.startup import WorkerSpec
from meshbook.errors import ProtocolError
from meshbook.launchers.base import LaunchedHost
from meshbook.shape.members import Extent, Region
from meshbook.wire import messages as wire
from meshbook.wire.connection import BATCH, MESSAGE, PIECE, Connection
from meshbook.wire.frames import FrameReader, pack
from meshbook.wire.kv_store import StoreOp
from meshbook.wire.transport import ControllerSocket

FRAMES, HANDSHAKES = 1_000_000, 100_000
UNDER_WAY = 2000  # frames that wait in ZeroMQ's queues, whose memory is not what is measured
MAX_GROWTH_BYTES = 32 << 20  # what the allocator may keep

REFUSALS = (*wire.MALFORMED, ProtocolError)
HEADER = struct.Struct("<BBxxIQQ")
CANARY = Path(f"/tmp/meshbook-canary-{os.getpid()}")


class Canary:
    """Unpickling it writes a file."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (CANARY,))


SEGMENT = wire.SegmentRef(1, 2, 3, 1 << 20, ((0, 100),))
SEEDS: tuple[wire.FromHost, ...] = (
    wire.SegmentFree(1, 2),
    wire.Hello(wire.PROTOCOL_VERSION, "host", "name", "machine", 1, 0, 4),
    wire.MeshReady(1, (wire.WorkerStarted(0, 1, "cpu", "log"),)),
    wire.SpawnFailed(1, "why"),
    wire.WorkerExited(1, 0, 1, "killed", "tail"),
    wire.MeshStopped(1),
    wire.Replies(1, (wire.RankReply(0, wire.OK, 1, 0.1, SEGMENT, (1, ((0, 10),)), b"x"),)),
    wire.Replies(2, (wire.RankReply(0, wire.RAISED, 1, 0.1, None, None, pickle.dumps(Canary())),)),
    wire.StreamTexts((wire.SharedText((0,), "stdout", "text" * 10, 1, 0),)),
    wire.OutputDropped(0, 100, "log", 1),
    wire.DisplayData(0, 1, False, True),
    wire.Logged(1, 0, 1),
    wire.StoreRequest(1, 0, 1, StoreOp("set", ("key",), (b"value",))),
    wire.Replies(3, (wire.RankReply(0, wire.OK, 0, 0.0, None, None, wire.encode("text")),)),
)


class Mutator:
    """Makes frames out of valid ones: as they are, flipped, cut, grown, spliced, or nothing but noise."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.headers = [wire.encode(seed) for seed in SEEDS]
        scalars = wire.encode([wire.Scalars("loss", 1, b"8 bytes.", b"8 bytes.", b"8 bytes.")])
        bundle = wire.encode({"data": {}, "metadata": {}, "transient": {}})
        self.payloads = [b"", pickle.dumps(Canary()), bundle, scalars]

    def mutate(self, data: bytes) -> bytes:
        """``data``, somewhat changed."""
        choose = self.random
        changed = bytearray(data)
        match choose.randrange(7):
            case 0:
                return data
            case 1 | 2:
                for _ in range(choose.randrange(1, 4)):
                    if changed:
                        changed[choose.randrange(len(changed))] = choose.randrange(256)
            case 3:
                del changed[choose.randrange(len(changed) + 1) :]
            case 4:
                at = choose.randrange(len(changed) + 1)
                changed[at:at] = choose.randbytes(choose.randrange(1, 16))
            case 5:
                other = choose.choice(self.headers)
                changed[choose.randrange(len(changed) + 1) :] = other[choose.randrange(len(other)) :]
            case _:
                return choose.randbytes(choose.randrange(64))
        return bytes(changed)

    def frames(self) -> list[bytes]:
        """The frames of a connection: mostly of the next message in order, or of a batch or a piece."""
        choose = self.random
        drawn = choose.random()
        if drawn < 0.1:
            batch = pack([choose.choice(self.headers) for _ in range(choose.randrange(2, 5))])
            return [HEADER.pack(BATCH, 0, 1, 1, 0) + self.mutate(batch)]
        if drawn < 0.2:
            fields = struct.pack("<QQQ", *(choose.choice((0, 1, 10, 1 << 40)) for _ in range(3)))
            return [HEADER.pack(PIECE, 0, 1, 1, 0) + self.mutate(fields), self.mutate(b"ten bytes.")]
        if drawn < 0.9:
            head = HEADER.pack(MESSAGE, 0, 1, 1, 0)
        else:
            kind, number, ack = choose.randrange(9), choose.randrange(4), choose.choice((0, 0, 1, 1 << 63))
            head = HEADER.pack(kind, choose.randrange(3), choose.randrange(3), number, ack)
            head = self.mutate(head) if choose.random() < 0.5 else head
        payload = [self.mutate(choose.choice(self.payloads)) for _ in range(choose.choice((0, 0, 1, 1, 2)))]
        return [head + self.mutate(choose.choice(self.headers)), *payload]


class Report(NamedTuple):
    """What a part did."""

    what: str
    done: int
    refused: int
    crashes: int
    seconds: float
    grown_bytes: int
    grown_descriptors: int

    @property
    def is_fine(self) -> bool:
        return not self.crashes and self.grown_bytes < MAX_GROWTH_BYTES and self.grown_descriptors <= 2

    def __str__(self) -> str:
        return (
            f"{self.what:14} {self.done:9,} in {self.seconds:5.1f} s, {self.refused:9,} refused, "
            f"{self.crashes} crashes, "
            f"memory {self.grown_bytes / (1 << 20):+.1f} MB, descriptors {self.grown_descriptors:+d}"
        )


class Meter:
    """Memory and descriptors from the end of the first tenth on: what is loaded and pooled once does not count."""

    def __init__(self, total: int) -> None:
        self.started = time.perf_counter()
        self._warm_at = total // 10
        self._rss = self._descriptors = 0

    def at(self, done: int) -> None:
        if not self._rss and done >= self._warm_at:
            self._rss, self._descriptors = _rss(), len(os.listdir("/proc/self/fd"))

    def report(self, what: str, done: int, refused: int, crashes: int) -> Report:
        seconds = time.perf_counter() - self.started
        descriptors = len(os.listdir("/proc/self/fd"))
        return Report(what, done, refused, crashes, seconds, _rss() - self._rss, descriptors - self._descriptors)


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- decoders --------------------------------------------------------------------------------------------------------


def fuzz_decoders(count: int, seed: int) -> Report:
    """Each frame into every decoder that a peer can reach."""
    mutator, meter = Mutator(seed), Meter(count)
    refused = crashes = 0
    for done in range(count):
        meter.at(done)
        frames = mutator.frames()
        header = frames[0][HEADER.size :]
        attempts: tuple[Callable[[], object], ...] = (
            lambda f=frames: [wire.decode_from_host(h) for h, _ in Connection(1).receive(f) or ()],  # type: ignore[misc]
            lambda h=header: wire.decode_to_host(h),  # type: ignore[misc]
            lambda h=header: wire.decode_from_worker(h),  # type: ignore[misc]
            lambda h=header: list(FrameReader().feed(h)),  # type: ignore[misc]
            lambda f=frames: list(FrameReader().feed(mutator.mutate(pack(f)))),  # type: ignore[misc]
        )
        for attempt in attempts:
            try:
                attempt()
            except REFUSALS:
                refused += 1
            except Exception:
                crashes += 1
                traceback.print_exc()
    return meter.report("decoders", count, refused, crashes)


# ---- a peer with a valid key -----------------------------------------------------------------------------------------


class NoProcess(LaunchedHost):
    """What a launcher returns, for a host that nobody has started."""

    pid = started = 0

    def failure(self) -> str | None:
        return None

    def close(self, timeout_s: float) -> None:
        pass

    def release(self) -> None:
        pass


class _Crashes(io.StringIO):
    """Stands in for stderr: the switchboard reports there what it did not expect."""

    count = 0

    def write(self, text: str) -> int:
        self.count += text.startswith(("Traceback", background.WORDS))
        return sys.__stdout__.write(text) if sys.__stdout__ else len(text)


def fuzz_authenticated(count: int, seed: int, workdir: Path) -> Report:
    """Frames of a peer with a valid key; whenever they cost it its place it gets a new one."""
    sock = ControllerSocket()
    endpoint = sock.bind("tcp://127.0.0.1:*")
    public, secret = sock.accept("host")
    inbox = TurnQueue()
    dispatcher = Dispatcher(inbox.submit, inbox.wake, itertools.count(1).__next__, sock.key_of, str)
    dispatcher.calls.default_listener = lambda event: None
    window = threading.Semaphore(UNDER_WAY)
    sender = threading.Thread(
        target=_send_frames, args=(endpoint, sock.public_key, public, secret, count, seed, window), name="fuzz"
    )
    sender.start()
    wake, meter = os.eventfd(0), Meter(count)
    done = refused = crashes = 0
    stderr = _Crashes()
    with contextlib.redirect_stderr(stderr):
        while done < count:
            sock.poll(wake, 1.0)
            for host_id, frames in sock.receive():
                meter.at(done)
                host = _settle(dispatcher, sock, host_id)
                try:
                    dispatcher.on_frames(host_id, frames)
                except Exception:
                    crashes += 1
                    traceback.print_exc()
                refused += bool(host.lost)
                done += 1
                window.release()
    sender.join()
    report = meter.report("authenticated", done, refused, crashes + stderr.count)
    os.close(wake)
    sock.close()
    dispatcher.payloads.close()
    return report


def _settle(dispatcher: Dispatcher, sock: ControllerSocket, host_id: str) -> HostState:
    """A host that nobody has wronged yet, with a mesh on it, and a call that waits for it."""
    host = HostState(host_id, 1, NoProcess(), sock, shares_environment=True)
    host.hello = wire.Hello(wire.PROTOCOL_VERSION, host_id, "fuzz", "elsewhere", 0, 0, 1)
    dispatcher.hosts = {host_id: host}
    dispatcher.meshes = {
        1: MeshState(1, "mesh", Extent.of({"gpus": 2}), [host, host], WorkerSpec("cpu", (), b"/", (), {}))
    }
    call: OpenCall = OpenCall(1, 1, "fuzz", Region.of({"gpus": 2}), Future(), fail_fast=True)
    dispatcher.calls.open(call, None)
    return host


def _send_frames(
    endpoint: str, server_key: str, public: str, secret: str, count: int, seed: int, window: threading.Semaphore
) -> None:
    mutator = Mutator(seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.sndhwm = 1000
    sock.routing_id = public.encode()
    sock.curve_serverkey = server_key.encode()
    sock.curve_publickey, sock.curve_secretkey = public.encode(), secret.encode()
    sock.connect(endpoint)
    for _ in range(count):
        window.acquire()
        sock.send_multipart(mutator.frames())
    sock.close(linger=10_000)
    context.term()


# ---- strangers -------------------------------------------------------------------------------------------------------

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_CONNECTIONS = 8


def fuzz_handshakes(count: int, seed: int) -> Report:
    """Handshakes that lead nowhere, `_CONNECTIONS` at a time, while the port is open for a host that does not come."""
    sock = ControllerSocket()
    endpoint = sock.bind("tcp://127.0.0.1:*")
    sock.accept("late")
    assert sock.door is not None
    port = int(endpoint.rpartition(":")[2])
    threads = [
        threading.Thread(target=_knock, args=(port, count // _CONNECTIONS, seed + index), name="stranger")
        for index in range(_CONNECTIONS)
    ]
    wake, meter = os.eventfd(0), Meter(count)
    crashes = 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or sock.door.strangers:
        sock.poll(wake, 0.1)
        crashes += len(list(sock.receive()))  # nobody has a key, so nothing may come
        meter.at(sock.door.unproven)
    for thread in threads:
        thread.join()
    report = meter.report("handshakes", sock.door.unproven, sock.door.unproven, crashes)
    os.close(wake)
    sock.close()
    return report


def _knock(port: int, count: int, seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(count):
        source = f"127.{choose.randrange(1, 255)}.{choose.randrange(256)}.{choose.randrange(1, 255)}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5, (source, 0)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leave no TIME_WAIT
            for piece in _handshake(choose):
                sock.sendall(piece)
            sock.settimeout(0.02)
            while sock.recv(4096):
                pass


def _handshake(choose: random.Random) -> Iterator[bytes]:
    mechanism = choose.choice((b"NULL", b"PLAIN", b"CURVE", b"CURVE", choose.randbytes(20)))
    greeting = _SIGNATURE + bytes([choose.choice((1, 2, 3, 3, 3, 255)), 1]) + mechanism.ljust(20, b"\0") + bytes(32)
    match choose.randrange(5):
        case 0:
            yield choose.randbytes(choose.randrange(200))
        case 1:
            yield greeting[: choose.randrange(len(greeting))]
        case 2:
            name = choose.choice((b"\x05HELLO", b"\x08INITIATE", b"\x05READY", b"\x07MESSAGE", choose.randbytes(4)))
            yield greeting
            yield _command(name + choose.randbytes(194), choose)
        case 3:
            yield greeting
            yield b"\x05HELLO\x01\x00".join((b"", bytes(72))) + choose.randbytes(120)
        case _:
            yield greeting
            yield bytes([choose.choice((2, 6))]) + struct.pack(">Q", choose.randrange(1 << 63)) + choose.randbytes(64)


def _command(body: bytes, choose: random.Random) -> bytes:
    size = len(body) if choose.random() < 0.8 else choose.randrange(256)
    return bytes([4, min(size, 255)]) + body


# ---- command ---------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the parts and say what came of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=FRAMES, help="for each of the first two parts")
    parser.add_argument("--handshakes", type=int, default=HANDSHAKES)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as workdir:
        reports = [
            fuzz_decoders(args.frames, args.seed),
            fuzz_authenticated(args.frames, args.seed, Path(workdir)),
            fuzz_handshakes(args.handshakes, args.seed),
        ]
    print("\n".join(map(str, reports)))
    unpickled = CANARY.exists()
    print("a canary was unpickled" if unpickled else "no byte reached a pickle")
    return int(unpickled or not all(report.is_fine for report in reports))


if __name__ == "__main__":
    sys.exit(main())
