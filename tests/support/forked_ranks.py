"""Real ranks without a mesh: forked as workers are, with the store served here as the controller serves it."""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from meshbook.wire.frames import FrameReader, pack
from meshbook.wire.kv_store import KeyValueStore, StoreOp

SCRIPT = Path(__file__).parents[1] / "runtime" / "groups" / "group_ranks.py"
encode = msgspec.msgpack.Encoder().encode
decode_op = msgspec.msgpack.Decoder(tuple[int, StoreOp]).decode


class Ranks:
    """Runs the scenarios of group_ranks.py on forked ranks, and serves their store."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-W", "error", str(SCRIPT), str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.threads_and_sockets = self._control.recv(64).split()
        self.store: KeyValueStore[int] = KeyValueStore()

    def run(self, scenario: str, size: int = 4, **options: object) -> list[Any]:
        """The scenario's results, by rank. Fails the test if a rank raised or is not done in time."""
        self.store = KeyValueStore()
        pairs = [socket.socketpair() for _ in range(size)]
        self._control.send(pickle.dumps((scenario, size, options)))
        socket.send_fds(self._control, [b"x"], [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        links = [ours for ours, _ in pairs]
        try:
            ended = self._serve(links)
        finally:
            for link in links:
                link.close()
        assert self._control.recv(64) == b"reaped"
        failures = [f"rank {rank}: {value}" for rank, (ok, value) in sorted(ended.items()) if not ok]
        assert not failures, "\n".join(failures)
        assert len(ended) == size, f"only ranks {sorted(ended)} are done; for the others see the stacks above"
        return [ended[rank][1] for rank in range(size)]

    def _serve(self, links: list[socket.socket]) -> dict[int, tuple[bool, Any]]:
        """Answer the ranks until all have closed their sockets, and each ends by itself at its deadline."""
        ended: dict[int, tuple[bool, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, link in enumerate(links):
                selector.register(link, selectors.EVENT_READ, (rank, FrameReader()))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, reader = key.data
                    data = links[rank].recv(1 << 16)
                    if not data:
                        selector.unregister(links[rank])
                        self.store.drop_client(rank)
                    for kind, content in reader.feed(data):
                        if kind == b"ended":
                            ended[rank] = pickle.loads(content)
                        else:
                            self._answer(links, rank, *decode_op(content))
        return ended

    def _answer(self, links: list[socket.socket], rank: int, request: int, op: StoreOp) -> None:
        for client, id, result in self.store.request(rank, request, op):
            links[client].sendall(pack([encode((id, result))]))

    def close(self) -> None:
        self._control.close()
        self._process.wait(60)
