"""The root of the errors, and mistakes that have no subject of their own: of users, of ourselves, of the other side."""

from __future__ import annotations


class MeshError(Exception):
    """Base of all errors that meshbook raises."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message alone, since the frames in between are ours, not the user's."""
        return [f"{type(self).__name__}: {self}"]


DeviceMeshError = MeshError
"""Another name of the same class: programs with tensors catch it by this one."""


class UsageError(MeshError, ValueError):
    """A command or an argument that makes no sense as given; the message shows what would."""


class ProtocolError(MeshError):
    """Two processes disagree about the wire."""


class LocalProtocolError(ProtocolError):
    """Our own side asked for something that the protocol or a state table does not allow."""


class PeerProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow."""
