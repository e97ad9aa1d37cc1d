"""What Monarch calls some things that a `meshbook.mesh.proc_mesh.ProcMesh` has under other names, or has not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from meshbook.actor.errors import ActorError
from meshbook.concurrency.future import Future
from meshbook.formatting import format_bytes
from meshbook.mesh.log_streaming import set_logging
from meshbook.mesh.proc_view import ProcView
from meshbook.shape.members import Extent, Region, arrange

if TYPE_CHECKING:
    from meshbook.mesh.host_mesh import HostMesh
    from meshbook.mesh.proc_mesh import ProcMesh


class MonarchNames(ProcView):
    """Base of ProcMesh."""

    @property
    def initialized(self) -> Future[bool]:
        """True when all processes are there.

        Raises, when asked: ActorError with what ``bootstrap`` has raised; ProcsNotStartedError for all else.
        """
        arrival = self._mesh.arrival
        if arrival is None:
            return Future.completed(True)
        arrival.is_asked = True
        asked: Future[bool] = Future()

        def settle(done: Future[bool]) -> None:
            if (error := done.exception(0)) is None:
                asked.set_result(True)
            else:
                why = error.__cause__.__cause__ if error.__cause__ is not None else None
                asked.set_exception(why if isinstance(why, ActorError) else error)

        arrival.done.add_done_callback(settle)
        return asked

    @property
    def host_mesh(self) -> HostMesh:
        """The hosts of these processes, with the axes that count hosts, where these are whole; else on one axis."""
        from meshbook.mesh.host_mesh import HostMesh  # which stands above us

        mesh = self._mesh
        hosts = list(dict.fromkeys(mesh.host_of(rank) for rank in self.ranks))
        sizes = {axis: size for axis, size in self.sizes.items() if axis in mesh.host_axes}
        if Extent.of(sizes).nelements != len(hosts):
            sizes = {"hosts": len(hosts)} if len(hosts) > 1 else {}
        members = arrange(Extent.of(sizes), range(len(hosts))) if sizes else Region.of({})
        return HostMesh(self._controller, hosts, members, waits=mesh.arrival is None).apart(mesh.siblings)

    def logging_option(self, stream_to_client: bool = False, level: int = logging.INFO) -> Future[None]:
        """Say how what calls print is shown, and from which level on ranks log to stderr; done when they all do.

        stream_to_client: as it comes, which is what happens anyway; False leaves it to the logs. Cells show theirs.
        Raises: UsageError for what is no level.
        """
        return set_logging(cast("ProcMesh", self), stream_to_client, level)

    def to_table(self) -> str:
        """A table of the processes: rank, place, host, pid, device, state and memory."""
        rows: list[tuple[str, ...]] = [("rank", "point", "host", "pid", "device", "state", "memory")]
        for status in cast("ProcMesh", self).status():
            what = (status.rank, status.point, status.host, status.pid, status.device, status.state)
            rows.append((*map(str, what), format_bytes(status.rss_bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
