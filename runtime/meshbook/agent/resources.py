"""What the parts of one agent share: made once, by `meshbook.agent.host_agent.HostAgent`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshbook.agent.output_pump import OfflineQuota
from meshbook.agent.segment_refs import SegmentRefCounts
from meshbook.shape.generations import Moves
from meshbook.system.event_loop import EventLoop
from meshbook.system.exits import OomWatch
from meshbook.values.segments import SegmentPool
from meshbook.wire.ticket import Ticket
from meshbook.wire.transport import Dialer
from meshbook.wire.uplink import Uplink


@dataclass(frozen=True)
class HostResources:
    """What the meshes of one host, its mail and its peers share."""

    name: str
    ticket: Ticket
    loop: EventLoop
    dialer: Dialer
    uplink: Uplink
    """To the controller."""
    segment_refs: SegmentRefCounts
    pool: SegmentPool
    """The agent's own shared memory."""
    moves: Mapping[int, Moves]
    """By mesh, of those whose ranks got other numbers."""
    quota: OfflineQuota = field(default_factory=OfflineQuota)
    oom: OomWatch = field(default_factory=OomWatch)

    @property
    def log_dir(self) -> Path:
        """Where the logs of ranks lie."""
        return Path(self.ticket.log_dir)
