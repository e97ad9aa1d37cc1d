"""Values and messages that cannot travel, or cannot be built where they arrive."""

from __future__ import annotations

from meshbook.errors.base import MeshError
from meshbook.formatting import format_bytes


class SerializationError(MeshError, RuntimeError):
    """A value that cannot travel between processes. ``path`` leads to the part that is at fault."""

    def __init__(
        self,
        path: str,
        type_name: str,
        reason: str,
        advice: str = "Send what it is made from, and create it on the ranks.",
    ) -> None:
        super().__init__(path, type_name, reason, advice)
        self.path, self.type_name, self.reason, self.advice = path, type_name, reason, advice

    def __str__(self) -> str:
        return f"{self.path} is a {self.type_name}, which cannot be sent: {self.reason}. {self.advice}"


class MessageTooLarge(MeshError):
    """A message of which one part is larger than any link carries; nothing of it was sent."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(size_bytes, limit_bytes)
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.size_bytes)} in one piece are too much for a message, which takes "
            f"{format_bytes(self.limit_bytes)}. Send values by push, pull or results, which may be of any size."
        )


class LoadError(MeshError):
    """A value that arrived and cannot be built there.

    where: the receiving process, as a person knows it.
    module: the module that is missing there, or that lacks something; empty when no module is at fault.
    reason: empty when the whole module is missing.
    """

    def __init__(self, where: str, module: str, reason: str) -> None:
        super().__init__(where, module, reason)
        self.where, self.module, self.reason = where, module, reason

    def __str__(self) -> str:
        by_value = (
            f"import {self.module} where the value comes from, and call "
            f"cloudpickle.register_pickle_by_value({self.module}) there"
        )
        if not self.module:
            needs_groups = "process group has not been initialized" in self.reason
            hint = " It is bound to process groups: take what it wraps, as in model.module." if needs_groups else ""
            return f"a value that arrived in {self.where} cannot be built there: {self.reason.rstrip('.')}.{hint}"
        if not self.reason:
            return (
                f'a value that arrived in {self.where} needs the module "{self.module}", which cannot be imported '
                f"there. Install it there; or, for a module of your own, {by_value}."
            )
        return (
            f'a value that arrived in {self.where} needs more than the module "{self.module}" has there '
            f"({self.reason}). Use the same version on both sides; or, for a module of your own, {by_value}."
        )
