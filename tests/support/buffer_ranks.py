"""What ranks do with buffers in the tests."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from meshbook.actor import Actor, endpoint
from meshbook.monarch import RDMABuffer


class Owner(Actor):
    """Has memory that others read and write."""

    @endpoint
    def make(self, count: int, value: float) -> RDMABuffer:
        """A buffer of ``count`` floats."""
        self.tensor = torch.full((count,), value)
        self.buffer = RDMABuffer(self.tensor)
        return self.buffer

    @endpoint
    def make_of_bytes(self, data: bytes, *, writable: bool) -> RDMABuffer:
        self.data = bytearray(data) if writable else data
        return RDMABuffer(memoryview(self.data))

    @endpoint
    def sum(self) -> float:
        return float(self.tensor.double().sum())

    @endpoint
    def drop(self) -> None:
        self.buffer.drop().get(5)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Reader(Actor):
    """Reads and writes the memory of others."""

    @endpoint
    def read(self, buffer: RDMABuffer, timeout: float | None = None) -> tuple[float, float, float]:
        """First, last, and the mean of all."""
        got = torch.zeros(buffer.size() // 4)
        buffer.read_into(got, timeout=timeout).get(60)
        return float(got[0]), float(got[-1]), float(got.double().mean())

    @endpoint
    async def read_async(self, buffer: RDMABuffer) -> float:
        got = torch.zeros(buffer.size() // 4)
        await buffer.read_into(got)
        return float(got.double().mean())

    @endpoint
    def read_bytes(self, buffer: RDMABuffer) -> bytes:
        got = bytearray(buffer.size())
        buffer.read_into(got).get(60)
        return bytes(got)

    @endpoint
    def write(self, buffer: RDMABuffer, count: int, value: float) -> None:
        buffer.write_from(torch.full((count,), value)).get(60)

    @endpoint
    def drop(self, buffer: RDMABuffer) -> None:
        buffer.drop().get(20)

    @endpoint
    def time_to_error(self, buffer: RDMABuffer) -> tuple[float, str]:
        """Seconds until reading fails, and how."""
        got: Any = torch.zeros(buffer.size() // 4)
        began = time.monotonic()
        try:
            while time.monotonic() < began + 20:
                began_one = time.monotonic()
                buffer.read_into(got).get(20)
        except Exception as error:
            return time.monotonic() - began_one, f"{type(error).__name__}: {error}"
        return 20.0, "none"
