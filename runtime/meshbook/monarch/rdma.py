"""Monarch's names for memory that others read and write: ``from meshbook.monarch.rdma import RDMABuffer, RDMAAction``.

A module of its own because programs import it by this name, as they import ``monarch.rdma``.
"""

from __future__ import annotations

from meshbook.actor.buffers.rdma import RDMAAction, RDMABuffer

__all__ = [
    "RDMAAction", "RDMABuffer", "RDMAReadTransferWarning", "RDMATcpFallbackWarning", "RDMAWriteTransferWarning",
    "get_rdma_backend", "is_ibverbs_available", "is_rdma_available",
]  # fmt: skip


class RDMAReadTransferWarning(Warning):
    """For programs that filter it: nothing here warns so, since reads go a way of their own where there is one."""


class RDMAWriteTransferWarning(Warning):
    """As `RDMAReadTransferWarning`, of writes."""


class RDMATcpFallbackWarning(Warning):
    """As `RDMAReadTransferWarning`, of TCP between hosts, which is no fallback here."""


def get_rdma_backend() -> str:
    """How bytes go between hosts: ``tcp``. On one host they are copied from memory to memory."""
    return "tcp"


def is_ibverbs_available() -> bool:
    """False: InfiniBand's verbs are not used."""
    return False


is_rdma_available = is_ibverbs_available
