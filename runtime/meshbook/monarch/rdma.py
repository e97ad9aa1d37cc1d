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
    """A warning for programs that filter it; never raised here."""


class RDMAWriteTransferWarning(Warning):
    """The same for writes."""


class RDMATcpFallbackWarning(Warning):
    """The same for TCP between hosts, which is no fallback here."""


def get_rdma_backend() -> str:
    """Return the transport between hosts: ``tcp``. On one host bytes are copied from memory to memory."""
    return "tcp"


def is_ibverbs_available() -> bool:
    """False: InfiniBand's verbs are not used."""
    return False


is_rdma_available = is_ibverbs_available
