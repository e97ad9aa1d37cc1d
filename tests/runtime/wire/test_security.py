"""Attacks on the real sockets of a real controller, from outside and from within. Each is counted, and costs nobody."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import strangers
import zmq
from patience import wait_until

from benchmarks.faults.relay import Relay, RelayedLauncher
from benchmarks.fuzz import NoProcess
from meshbook import ProcMesh, start_hosts
from meshbook.controller.host_state import HostState
from meshbook.errors import MeshError
from meshbook.values.segments import map_segment
from meshbook.wire import messages as wire
from meshbook.wire.connection import _HEAD, _PIECE, ACK, BATCH, BEAT, MESSAGE, PIECE
from meshbook.wire.tcp import MAX_PER_ADDRESS, ConnectionFilter, borrow
from meshbook.wire.ticket import Ticket
from meshbook.wire.zmq_transport import Gate

NOBODY = 65534
SO_LOCK_FILTER = 44  # asm-generic/socket.h


class Front:
    """The controller of a mesh over TCP, seen from where attackers stand."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mesh = mesh
        self.controller = mesh._controller
        self.socket = self.controller._socket
        assert self.socket.door is not None
        self.door = self.socket.door
        endpoints = self.controller.folder.state.endpoints.values()
        (self.endpoint,) = (endpoint for endpoint in endpoints if endpoint.startswith("tcp://"))
        self.port = int(self.endpoint.rpartition(":")[2])

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Expect a host that never comes, so that the port stays open."""
        self.controller.accept("late")
        wait_until(lambda: self.door.is_open)
        try:
            yield
        finally:
            self.controller.ask(lambda: self.socket.revoke("late"))

    def bad(self) -> int:
        """All bad input so far."""
        return self.socket.rejected + self.door.unproven + self.door.turned_away

    def call_s(self, calls: int = 40) -> float:
        """The median time of a small call on all ranks."""
        times = []
        for _ in range(calls):
            started = time.perf_counter()
            assert self.mesh.execute(_one).get(20).values() == [1] * len(self.mesh)
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def _one() -> int:
    return 1


@pytest.fixture(scope="module")
def front(mesh2x2: ProcMesh) -> Front:
    return Front(mesh2x2)


# ---- strangers -------------------------------------------------------------------------------------------------------


def test_the_port_is_shut_once_all_hosts_are_there(front: Front) -> None:
    wait_until(lambda: not front.door.is_open or not front.door.can_shut)
    if not front.door.can_shut:
        pytest.skip("this kernel lets only root set socket filters")
    assert strangers.dial(front.port, 0.3) is None
    with front.opened():
        sock = strangers.dial(front.port)
        assert sock is not None
        sock.close()
    wait_until(lambda: not front.door.is_open)


def test_a_port_that_cannot_be_shut_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)  # from here on the kernel refuses any, even root's
        door = ConnectionFilter(listener)
        for _ in range(2):
            door.settle(())
        assert door.is_open
        socket.create_connection(listener.getsockname(), timeout=20).close()


@pytest.mark.quick("scan")
@pytest.mark.parametrize(
    "attack", [strangers.send_garbage, strangers.scan, strangers.ask_by_http, strangers.claim_2_gb]
)
def test_strangers_are_counted_and_slow_nobody(front: Front, attack: Callable[[int], None]) -> None:
    usual_s = front.call_s()
    with front.opened():
        before, rss = front.bad(), psutil.Process().memory_info().rss
        with strangers.attacking(lambda: attack(front.port)) as rounds:
            wait_until(lambda: rounds[0] >= 3)
            attacked_s = front.call_s()
        wait_until(lambda: front.bad() >= before + 3)
        wait_until(lambda: front.door.strangers == 0)
    assert attacked_s < 10 * usual_s + 0.05
    assert psutil.Process().memory_info().rss - rss < 100 << 20


@pytest.mark.parametrize("has_key", [False, True])
def test_a_pickle_of_a_stranger_is_never_opened(front: Front, tmp_path: Path, has_key: bool) -> None:
    canary = tmp_path / "canary"
    with front.opened():
        before = front.bad()
        key = front.socket.public_key if has_key else None
        for payload in (strangers.canary_pickle(canary), _message(1, 1, HELLO) + b"x"):
            strangers.dial_with_zmq(front.port, payload, key)
        wait_until(lambda: front.bad() > before)
    assert front.call_s(3) < 1
    assert not canary.exists()


def test_a_stranger_gets_no_answer_but_the_greeting_of_the_protocol(front: Front) -> None:
    with front.opened():
        for hello in (b"GET / HTTP/1.1\r\n\r\n", strangers.greeting(b"NULL"), strangers.greeting(b"PLAIN")):
            answer = strangers.send(front.port, hello)
            assert len(answer) <= 64
            assert front.socket.public_key.encode() not in answer


def test_slow_handshakes_are_few_and_end_after_five_seconds(front: Front) -> None:
    descriptors = psutil.Process().num_fds()
    usual_s = front.call_s()
    with front.opened():
        turned_away = front.door.turned_away
        slow = strangers.Slow(front.port, 150)
        try:
            most = MAX_PER_ADDRESS + front.door._missing
            wait_until(lambda: slow.alive() <= most)
            assert front.door.turned_away - turned_away >= len(slow.sockets) - most
            assert front.call_s() < 10 * usual_s + 0.05
            wait_until(lambda: slow.alive() == 0, 10)
        finally:
            slow.close()
        wait_until(lambda: front.door.strangers == 0)
    wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)


class RecordingRelay(Relay):
    """Keeps what agents send."""

    def __init__(self, target: tuple[str, int] | str, address: str = "127.0.0.1") -> None:
        super().__init__(target, address)
        self.recorded: dict[socket.socket, bytearray] = {}

    def _accept(self) -> None:
        known = set(self._peers)
        super()._accept()
        for sock in set(self._peers) - known:
            if sock.getsockname()[1] == self.port:
                self.recorded[sock] = bytearray()

    def _forward(self, sock: socket.socket) -> None:
        if sock in self.recorded:
            with contextlib.suppress(OSError):
                self.recorded[sock] += sock.recv(1 << 16, socket.MSG_PEEK)
        super()._forward(sock)


def test_a_number_that_is_no_connection_any_more_is_left_alone() -> None:
    descriptor = os.eventfd(0)
    before = psutil.Process().num_fds()
    assert borrow(descriptor) is None
    assert psutil.Process().num_fds() == before
    os.close(descriptor)
    assert borrow(descriptor) is None


def test_a_gate_lets_few_strangers_in_and_answers_meanwhile() -> None:
    gate = Gate("tcp://127.0.0.1:*", lambda question: question[::-1])
    port = int(gate.endpoint.rpartition(":")[2])
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                come = socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.2", 0))
                stack.enter_context(come)
            assert gate._door is not None
            wait_until(lambda: gate._door.turned_away >= 200 - MAX_PER_ADDRESS, timeout_s=30)
            assert gate._door.strangers <= MAX_PER_ADDRESS
            ask = f"print(ask_gate({gate.endpoint!r}, {gate.key!r}, b'who', 10).decode())"
            command = [sys.executable, "-c", f"from meshbook.wire.zmq_transport import ask_gate; {ask}"]
            assert subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout == "ohw\n"
    finally:
        gate.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 10)


def test_what_was_overheard_cannot_be_said_again(front: Front) -> None:
    launcher = RelayedLauncher()
    launcher.relay_class = RecordingRelay
    mesh = start_hosts({}, launcher).spawn_procs({"gpus": 1}, owns_hosts=True)
    relay = launcher.relay
    assert isinstance(relay, RecordingRelay)
    try:
        mesh.run("n = 0").get(20)
        for _ in range(5):
            mesh.run("n += 1").get(20)
        recorded = [bytes(said) for said in relay.recorded.values() if len(said) > 500]
        assert len(recorded) == 1
        assert b"meshbook" not in b"".join(recorded)  # and it is encrypted
        bad = front.bad()
        with front.opened():
            for said in recorded:
                strangers.send(front.port, said[:64], said[64:], wait_s=0.3)
            wait_until(lambda: front.bad() > bad)
        assert mesh.pull("n").get(20).values() == [5]
    finally:
        mesh.stop()
        relay.close()


# ---- hosts that have a key and lie -----------------------------------------------------------------------------------


class Liar:
    """A host with a valid key, played by the test."""

    def __init__(self, front: Front, name: str) -> None:
        self.front = front
        public, secret = front.controller.accept(name)
        self.ticket = Ticket(name, front.endpoint, front.socket.public_key, public, secret, "", 1, 5.0, False)
        self.host: HostState = front.controller.expect_host(self.ticket.host_id, NoProcess(), False)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def dial(self, key: str) -> zmq.Socket[bytes]:
        """A connection in the name of ``key``, by which it has said hello."""
        sock = self.open(key)
        sock.send(_message(1, 1, HELLO))
        return sock

    def open(self, key: str) -> zmq.Socket[bytes]:
        """A connection in the name of ``key``."""
        sock = self.context.socket(zmq.DEALER)
        self.sockets.append(sock)
        sock.linger = 0
        sock.routing_id = key.encode()
        sock.curve_serverkey = self.ticket.controller_key.encode()
        sock.curve_publickey, sock.curve_secretkey = self.ticket.public_key.encode(), self.ticket.secret_key.encode()
        sock.connect(self.ticket.endpoint)
        return sock

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.front.controller.stop_hosts([self.host], 1.0)


@pytest.fixture
def liar(front: Front, request: pytest.FixtureRequest) -> Iterator[Liar]:
    liar = Liar(front, f"liar-{request.node.name}")
    yield liar
    liar.close()


HELLO = wire.Hello(wire.PROTOCOL_VERSION, "liar", "liar", "elsewhere", 1, 0, 1)


def _message(seq: int, epoch: int, message: wire.FromHost | None, *, ack: int = 0, kind: int = MESSAGE) -> bytes:
    return _HEAD.pack(kind, 0, epoch, seq, ack) + (wire.encode(message) if message is not None else b"")


def _piece(*fields: int) -> bytes:
    return _message(2, 1, None, kind=PIECE) + _PIECE.pack(*fields)


def _reply(rank: int, *, frames: int = 0, segment: wire.SegmentRef | None = None, bulk: Any = None) -> wire.RankReply:
    return wire.RankReply(rank, wire.OK, frames, 0.0, segment, bulk, pickle.dumps(2))


def _lies(mesh: int, call: int) -> dict[str, list[bytes]]:
    """Frames that no host of ours sends."""
    stolen = wire.SegmentRef(os.getpid(), 0, 1, 1 << 30, ((0, 1 << 30),))
    return {
        "no link header": [b"x"],
        "acknowledges the future": [_message(2, 1, None, ack=1 << 60, kind=ACK)],
        "no message": [_message(2, 1, None)],
        "garbage": [_message(2, 1, None) + os.urandom(64)],
        "a batch of 4 GB": [_message(2, 1, None, kind=BATCH) + b"\x01\x00\x00\x00\xff\xff\xff\xff"],
        "a batch that is cut": [_message(2, 1, None, kind=BATCH) + b"\x01\x00\x00\x00\x10\x00\x00\x00"],
        "a display without content": [_message(2, 1, wire.DisplayData(0, 1, False, False))],
        "scalars of another's rank": [_message(2, 1, wire.Logged(mesh, 0, 1)), b"\x90"],
        "a piece of 1 EB": [_piece(1, 1 << 60, 0), b"x"],
        "a piece behind one that did not come": [_piece(1, 10, 5), b"x"],
        "a payload that was not sent": [_message(2, 1, wire.Replies(call, (_reply(0, bulk=(1, ((0, 1),))),)))],
        "more frames than came": [_message(2, 1, wire.Replies(call, (_reply(0, frames=3),)))],
        "fewer frames than none": [_message(2, 1, wire.Replies(call, (_reply(0, frames=-1),)))],
        "memory that is not shared": [_message(2, 1, wire.Replies(call, (_reply(0, segment=stolen),)))],
        "a reply for another's rank": [_message(2, 1, wire.Replies(call, (_reply(0),)))],
        "the death of another's rank": [_message(2, 1, wire.WorkerExited(mesh, 0, 0, "lies", ""))],
        "another's mesh is ready": [
            _message(2, 1, wire.MeshReady(mesh, (wire.WorkerStarted(0, 1, "cpu", "/etc/passwd"),)))
        ],
    }


@pytest.mark.parametrize("lie", list(_lies(0, 0)))
def test_a_host_that_lies_is_lost_and_nobody_else(front: Front, liar: Liar, lie: str) -> None:
    running = front.mesh.execute(_sleep_and_answer, 0.5)
    frames = _lies(front.mesh._mesh.id, running.call.id)[lie]
    impossible = front.controller._dispatcher.impossible
    liar.dial(liar.ticket.public_key).send_multipart(frames)
    wait_until(lambda: bool(liar.host.lost))
    assert liar.host.lost.startswith("it sent something impossible: ")
    assert front.controller._dispatcher.impossible == impossible + 1
    assert running.get(20).values() == [1] * 4
    assert front.call_s(3) < 2


def _sleep_and_answer(seconds: float) -> int:
    time.sleep(seconds)
    return 1


def test_a_frame_beyond_the_limit_ends_its_connection_only(front: Front, liar: Liar) -> None:
    before = psutil.Process().memory_info().rss
    liar.dial(liar.ticket.public_key).send(_message(1, 1, None) + bytes(65 << 20))
    time.sleep(0.5)
    assert front.call_s(5) < 2
    assert psutil.Process().memory_info().rss - before < 200 << 20  # the test's own copy included


def test_repeated_and_foreign_frames_are_ignored(front: Front, liar: Liar) -> None:
    sock = liar.dial(liar.ticket.public_key)
    first = _message(1, 1, HELLO)
    for frames in [
        first,
        first,
        first,
        _message(2, 0, HELLO),
        _message(3, 0, HELLO),
        _message(2, 1, HELLO, kind=BEAT)[:24],
    ]:
        sock.send(frames)
    theirs = liar.host.connection
    wait_until(lambda: theirs._asked == 1)  # the last of them says that there is another
    assert theirs._received == 1 and not liar.host.lost


def test_nothing_comes_before_hello(front: Front, liar: Liar) -> None:
    sock = liar.open(liar.ticket.public_key)
    sock.send(_message(1, 1, wire.MeshStopped(front.mesh._mesh.id)))
    wait_until(lambda: bool(liar.host.lost))
    assert liar.host.lost == "it sent something impossible: MeshStopped came before its hello"


def test_a_host_cannot_take_the_place_of_another(front: Front, liar: Liar) -> None:
    """A ROUTER hands a taken routing id to the newcomer; what would have to be guessed is the other's key."""
    rejected = front.socket.rejected
    for host in front.mesh._mesh.hosts:
        liar.dial(host.id)
    wait_until(lambda: front.socket.rejected >= rejected + len(front.mesh._mesh.hosts))
    assert front.call_s(5) < 2
    assert not any(host.lost for host in front.mesh._mesh.hosts)


# ---- ranks that lie to their agent -----------------------------------------------------------------------------------


@pytest.mark.quick("none")
@pytest.mark.parametrize(
    "nonsense",
    [b"\xff" * 64, b"\x01\x00\x00\x00\x01\x00\x00\x00\xc1", b"\x00\x00\x00\x00"],
    ids=["size", "type", "none"],
)
def test_a_rank_that_garbles_its_socket_is_lost_alone(mesh2: ProcMesh, nonsense: bytes) -> None:
    with pytest.raises(MeshError, match=r"rank 1 .* ended: it sent something impossible"):
        mesh2.slice(gpus=1).execute(_write_to_own_sockets, nonsense).get(20)
    assert mesh2.slice(gpus=0).evaluate("rank").get(20).values() == [0]


def _write_to_own_sockets(nonsense: bytes) -> None:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:") and int(entry) > 2:
                os.write(int(entry), nonsense)
    time.sleep(20)


def test_shared_memory_that_could_shrink_is_not_mapped() -> None:
    """A mapping of a file that shrinks ends its process by SIGBUS."""
    fd = os.memfd_create(f"meshbook-{os.getpid()}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 8 << 20)
        for size in (8 << 20, 16 << 20):
            with pytest.raises(MeshError, match="shorter"):
                map_segment(wire.SegmentRef(os.getpid(), fd, 1, size, ((0, size),)), lambda _: None)
    finally:
        os.close(fd)


# ---- other users of the machine, and what they can see ---------------------------------------------------------------


def _family() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def _secrets(front: Front) -> set[str]:
    """All keys that the session keeps to itself."""
    secret = front.socket._secret
    keys = set(front.socket._keys.values())
    assert len(keys) >= 2
    return {secret, *keys}


def test_no_secret_is_in_command_lines_environments_or_logs(front: Front, mesh4: ProcMesh) -> None:
    front.mesh.run("print('hello'); import sys; print('there', file=sys.stderr)").get(20)
    secrets = [secret.encode() for secret in _secrets(front)]
    seen = 0
    for process in _family():
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{process.pid}/{name}").read_bytes()
            assert not [secret for secret in secrets if secret in content], process
            seen += len(content)
    folder = front.controller.folder
    for path in [*folder.logs.rglob("*"), *folder.path.rglob("*")]:
        if path.is_file():
            content = path.read_bytes()
            assert not [secret for secret in secrets if secret in content] or path.stat().st_mode & 0o077 == 0, path
            if path.is_relative_to(folder.logs):
                assert not [secret for secret in secrets if secret in content], path
            seen += len(content)
    assert seen > 1000
    assert len(_family()) > 8


def test_files_are_the_users_own(front: Front, mesh4: ProcMesh) -> None:
    mesh4.run("print(1)").get(20)
    folder = front.controller.folder
    for root in (folder.logs, folder.path):
        assert root.stat().st_mode & 0o777 == 0o700
        for path in root.rglob("*"):
            mode = path.stat().st_mode & 0o777
            assert not mode & 0o077 or path.is_socket() or path.name == "owner", f"{path} has mode {mode:o}"


def test_nothing_has_a_public_name(front: Front, mesh4: ProcMesh) -> None:
    """No abstract unix sockets, no named shared memory; TCP on loopback only."""
    import torch

    mesh4.push({"big": torch.zeros(1 << 20)}).get(20)
    inodes, paths = set(), set()
    for process in _family():
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(entry)
                inodes.update(re.findall(r"socket:\[(\d+)\]", target))
                paths.add(target)
    assert not [path for path in paths if path.startswith("/dev/shm/")]
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = {line[7] for line in unix if len(line) > 7 and line[6] in inodes}
    assert not [name for name in named if name.startswith("@")]
    listening = [
        line[1]
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in map(str.split, Path(file).read_text().splitlines()[1:])
        if line[3] == "0A" and line[9] in inodes
    ]
    assert listening
    assert all(address.startswith(("0100007F:", "0000000000000000FFFF00000100007F:")) for address in listening)


LOOK_AROUND = """
import os, socket, sys
pids, endpoint, *paths = sys.argv[1].split(","), *sys.argv[2:]
def attempt(what, action):
    try:
        action()
    except OSError:
        return
    print("could", what)
for pid in pids:
    for name in ("environ", "fd", "mem", "maps"):
        path = f"/proc/{pid}/{name}"
        attempt("read " + path, lambda: os.listdir(path) if name == "fd" else open(path, "rb").read(16))
    for fd in range(64):
        attempt(f"open fd {fd} of {pid}", lambda: open(f"/proc/{pid}/fd/{fd}", "rb"))
for path in paths:
    attempt("list " + path, lambda: os.listdir(path))
    attempt("write " + path, lambda: open(path + "/x", "w"))
attempt("connect to " + endpoint, lambda: socket.socket(socket.AF_UNIX).connect(endpoint))
print("looked")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
def test_other_users_find_nothing(front: Front, mesh4: ProcMesh) -> None:
    mesh4.run("x = 1").get(20)
    folder = front.controller.folder
    pids = ",".join(str(process.pid) for process in _family()[1:])
    ipc = next((str(path) for path in folder.path.iterdir() if path.is_socket()), str(folder.path / "control"))
    if (python := shutil.which("python3", path="/usr/bin:/bin")) is None:
        pytest.skip("there is no Python in reach of other users")
    looked = subprocess.run(
        [python, "-c", LOOK_AROUND, pids, ipc, str(folder.path), str(folder.logs)],
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert looked.stdout == "looked\n", looked


def test_a_folder_that_another_user_prepared_is_refused(tmp_path: Path) -> None:
    from meshbook.errors import SpawnError
    from meshbook.system.user_folders import private_folder

    trap = tmp_path / "trap"
    trap.mkdir()
    trap.chmod(0o775)
    with pytest.raises(SpawnError, match="0700"):
        private_folder(trap)
    trap.chmod(0o755)
    assert private_folder(trap).stat().st_mode & 0o777 == 0o700
    assert private_folder(tmp_path / "a" / "b").parent.stat().st_mode & 0o777 == 0o700
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    with pytest.raises(SpawnError, match="0700"):
        private_folder(link)
