"""Monarch's names for memory that others read and write: ``from meshbook.rdma import RDMABuffer, RDMAAction``.

A module of its own because programs import it by this name, as they import ``monarch.rdma``.
"""

from __future__ import annotations

from meshbook.actor.buffers.action import RDMAAction
from meshbook.actor.buffers.rdma_buffer import RDMABuffer

__all__ = ["RDMAAction", "RDMABuffer", "get_rdma_backend", "is_ibverbs_available", "is_rdma_available"]


def get_rdma_backend() -> str:
    """How bytes go between hosts: ``tcp``. On one host they are copied from memory to memory."""
    return "tcp"


def is_ibverbs_available() -> bool:
    """False: InfiniBand's verbs are not used."""
    return False


is_rdma_available = is_ibverbs_available
