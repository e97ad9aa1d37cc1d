"""What a message to a mailbox costs: from the notebook's process, from rank to rank, and between two hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.figures import Figure, Settings
from benchmarks.stats import interleave, summarise
from benchmarks.subject import TIMEOUT_S, mesh, no_op
from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.actor.router import current_router
from meshbook.calls.call import CallRequest
from meshbook.calls.mailboxes import LoadArgs, Outcome, ReplyTo
from meshbook.mesh.proc_view import arrange_ranks
from meshbook.shape.members import Members, members_of
from meshbook.values.pickling import dumps
from meshbook.wire.messages import OK, Call
from meshbook.worker.mail import WorkerMail
from meshbook.worker.process import WorkerRouter

QUESTION = (
    "Round trip of an empty call to a raw mailbox, which its process answers on the thread of the mail: from this "
    "process, beside a call to the main thread; between two ranks of one host; between ranks of two agents over TCP on "
    "loopback. And how many a rank sends per second when none waits for the one before, and when none is answered."
)
MAILBOX = 3
IN_FLIGHT = 1000


def run(settings: Settings) -> Iterator[Figure]:
    """All of them in one run."""
    with ExitStack() as stack:
        here = stack.enter_context(mesh(2))
        hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
        apart = stack.enter_context(hosts.spawn_procs({"gpus": 1}, name="apart"))
        for procs in (here, apart):
            procs.execute(open_mailbox).get(TIMEOUT_S)
        first = here.slice(gpus=0)
        body = dumps(((), {}), what="nothing")

        def mail() -> None:
            request = CallRequest("", members_of(first), body, "mail", mailbox=MAILBOX)
            here._controller.call(here._mesh, request).get(TIMEOUT_S)

        samples = interleave(
            {"main thread": lambda: no_op(first).get(TIMEOUT_S), "mailbox": mail},
            rounds=settings.count(20), per_round=settings.count(50), warmup=50,
        )  # fmt: skip
        for subject, seconds in samples.items():
            yield Figure("mail", "notebook to rank", "1 rank", subject, "us", summarise([s * 1e6 for s in seconds]))
        for where, procs in (("one host", here), ("two agents", apart)):
            yield from _between(where, procs, settings)


def _between(where: str, procs: ProcMesh, settings: Settings) -> Iterator[Figure]:
    rank, callee = arrange_ranks(procs, {"caller": 1}, [0]), members_of(procs).select([1])
    trips = rank.execute(round_trips, procs.id, callee, settings.count(1000)).get(TIMEOUT_S).values()[0]
    yield Figure("mail", "rank to rank", where, "mailbox", "us", summarise([s * 1e6 for s in trips]))
    for what, answered in (("pipelined", True), ("posted", False)):
        rates = [
            IN_FLIGHT / rank.execute(many, procs.id, callee, answered).get(TIMEOUT_S).values()[0]
            for _ in range(settings.count(10))
        ]
        yield Figure("mail", what, where, "mailbox", "per s", summarise(rates))


# ---- on the ranks --------------------------------------------------------------------------------------------------


def open_mailbox() -> None:
    """Answer everything at once."""

    def handler(call: Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        load_args()
        reply(Outcome(OK, None, has_value=True))

    _mail().boxes.open(MAILBOX, handler)


def round_trips(mesh_id: int, callee: Members, count: int) -> list[float]:
    """Seconds of each."""
    mail, body = _mail(), dumps(((), {}), what="nothing")
    times = []
    for index in range(count + 50):
        started = time.perf_counter()
        mail.call(CallRequest("", callee, body, "mail", mesh_id, MAILBOX)).get(TIMEOUT_S)
        if index >= 50:
            times.append(time.perf_counter() - started)
    return times


def many(mesh_id: int, callee: Members, answered: bool) -> float:
    """How long `IN_FLIGHT` messages take until the last has come."""
    mail, body = _mail(), dumps(((), {}), what="nothing")
    started = time.perf_counter()
    if not answered:
        for _ in range(IN_FLIGHT - 1):
            mail.call(CallRequest("", callee, body, "mail", mesh_id, MAILBOX, reply=False))
    count = IN_FLIGHT if answered else 1
    futures = [mail.call(CallRequest("", callee, body, "mail", mesh_id, MAILBOX)) for _ in range(count)]
    for future in futures:
        future.get(TIMEOUT_S)
    return time.perf_counter() - started


def _mail() -> WorkerMail:
    router = current_router()
    assert isinstance(router, WorkerRouter)
    return router.worker.mail
