"""Hosts that are reached by ssh lose agents, connections, machines and ranks; what is left goes on, and is healed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import processes
from benchmarks.faults import on_rank
from benchmarks.faults.findings import Findings
from benchmarks.faults.load import Watched, numbers
from benchmarks.faults.relay import Relay
from benchmarks.ssh_hosts import HOSTS, LoopbackHosts, NoDaemonError, loopback_hosts
from meshbook import ProcMesh, errors, start_hosts
from meshbook.launchers.ssh import SSHLauncher

NAMES = ("nodeA", "nodeB")
RANKS_EACH = 2
DEADLINE_S = 90.0
CALLS_PER_FAULT = 20
GIVEN_UP_S = 15.0
"""A connection that is silent for so long is a lost host: `SSHLauncher` has ssh ask three times, each after 5 s."""
CUTS_S = (1.0, 5.0, 2 * GIVEN_UP_S)
SETUP = "ledger = []"


class HostCampaign:
    """One mesh over two hosts, each behind a relay that is the network between."""

    def __init__(self, config: Path, relays: list[Relay], findings: Findings) -> None:
        self.relays, self.findings = relays, findings
        hosts = start_hosts({"hosts": len(NAMES)}, SSHLauncher(NAMES, options=["-F", str(config)]))
        self.mesh: ProcMesh = hosts.spawn_procs({"gpus": RANKS_EACH}, name="far", device="cpu", owns_hosts=True)
        self.plugged_in = 0.0  # when a cut has ended
        self.expected: list[list[int]] = [[] for _ in self.mesh.ranks]
        """The ledger of each rank: the calls since its process began."""
        self.mesh.run(SETUP).get(DEADLINE_S)
        self.faults: dict[str, Callable[[int], None]] = {
            "agents killed": lambda host: os.kill(self._pids_there(host)[0], signal.SIGKILL),
            "ranks killed": lambda host: os.kill(self._pids_there(host)[1], signal.SIGKILL),
            "ssh clients killed": lambda host: os.kill(self.mesh._mesh.hosts[host].launched.pid, signal.SIGKILL),
            "connections reset": lambda host: self._note(self.relays[host].cut() > 0, "no connection to reset"),
            **{f"cuts of {seconds:g} s": self._cut(seconds) for seconds in CUTS_S},
        }

    def run(self, draw: random.Random, count: int) -> None:
        """Each fault strikes one of the hosts while calls are under way; all of them before any comes again."""
        kinds: list[str] = []
        for _ in range(count):
            if not kinds:
                kinds = draw.sample(list(self.faults), len(self.faults))
            self._strike(kinds.pop(), draw.randrange(len(NAMES)))
            self._judge()

    def _strike(self, kind: str, host: int) -> None:
        before = self._everybody()
        calls = self._call()
        self.faults[kind](host)
        struck = time.monotonic()
        calls += self._call()
        survives = kind in {f"cuts of {seconds:g} s" for seconds in CUTS_S if seconds < GIVEN_UP_S}
        self.findings.count(kind)
        for call in calls:
            if not call.wait(struck + DEADLINE_S):
                self.findings.hangs.append(f"{kind}: call {call.number}")
                return
            self.findings.wrong += call.wrong_results()
            for rank in call.results():
                self.expected[rank].append(call.number)
            if call.error is not None and (
                survives or not isinstance(call.error, (errors.WorkerLost, errors.CallError))
            ):
                self.findings.wrong.append(f"{kind}: call {call.number} failed with {call.error!r}")
        self.findings.time(f"{kind}: all calls ended", time.monotonic() - struck)
        lost = set() if survives else self._await_loss(kind, host)
        self._heal(kind, before, lost)

    def _await_loss(self, kind: str, host: int) -> set[int]:
        """The ranks that are lost, once that is known."""
        first = host * RANKS_EACH
        expected = {first} if kind == "ranks killed" else set(range(first, first + RANKS_EACH))
        deadline = time.monotonic() + DEADLINE_S
        while set(self.mesh.lost) != expected:
            if time.monotonic() > deadline:
                self.findings.wrong.append(f"{kind}: {self.mesh.lost} are lost, and not {sorted(expected)}")
                break
            time.sleep(0.01)
        while time.monotonic() < self.plugged_in:
            time.sleep(0.05)
        return set(self.mesh.lost)

    def _heal(self, kind: str, before: list[int], lost: set[int]) -> None:
        started = time.monotonic()
        if lost:
            self.mesh.heal([SETUP], force=True)
            self.findings.time("healed", time.monotonic() - started)
        for rank in lost:
            self.expected[rank] = []
        if self.mesh.run(on_rank.PROVE).get(DEADLINE_S).values() != [len(before)] * len(before):
            self.findings.wrong.append(f"{kind}: the process group does not count all ranks")
        changed = {rank for rank, (old, new) in enumerate(zip(before, self._everybody(), strict=True)) if old != new}
        if changed != lost:
            self.findings.wrong.append(f"{kind}: {sorted(changed)} are other processes, where {sorted(lost)} were lost")

    def _judge(self) -> None:
        """What each rank ran is what was asked of it, once and in order."""
        for rank, ledger in enumerate(self.mesh.pull("ledger").get(DEADLINE_S).values()):
            ours = [number for number in ledger if number in set(self.expected[rank])]
            if ours != self.expected[rank] or len(ledger) != len(set(ledger)):
                self.findings.wrong.append(f"rank {rank} ran {ledger}, and was asked {self.expected[rank]}")
                self.expected[rank] = list(ledger)

    def _everybody(self) -> list[int]:
        return self.mesh.execute(os.getpid).get(DEADLINE_S).values()

    def _call(self) -> list[Watched]:
        """Calls to all, as long as nobody is known to be lost."""
        calls = []
        for number in itertools.islice(numbers, CALLS_PER_FAULT):
            try:
                calls.append(Watched(self.mesh.execute(on_rank.note, number), number, "call", number))
            except errors.WorkerLost:
                break
        return calls

    def _pids_there(self, host: int) -> list[int]:
        """The agent of a host, and its ranks."""
        hello = self.mesh._mesh.hosts[host].hello
        assert hello is not None
        return [hello.pid, *self._everybody()[host * RANKS_EACH : (host + 1) * RANKS_EACH]]

    def _cut(self, seconds: float) -> Callable[[int], None]:
        def cut(host: int) -> None:
            self.plugged_in = time.monotonic() + seconds
            self.relays[host].silence(seconds)

        return cut

    def _note(self, right: bool, what: str) -> None:
        if not right:
            self.findings.wrong.append(what)


def run_hosts(seed: int, count: int) -> Findings:
    """``count`` faults into two hosts by a real sshd on loopback; nothing where there is none."""
    findings = Findings("hosts", f"{count} faults into 2 hosts by ssh with {RANKS_EACH} ranks each, seed {seed}")
    before = _ways_back()
    try:
        with findings.running(), loopback_hosts() as there:
            with contextlib.ExitStack() as stack:
                relays, config = _relayed(there, stack)
                campaign = HostCampaign(config, relays, findings)
                stack.callback(campaign.mesh.stop)
                with findings.judging(""):
                    campaign.run(random.Random(seed), count)
            findings.left += _left(there, before)
    except NoDaemonError as error:
        findings.notes.append(f"left out: {error}")
    return findings


def _relayed(there: LoopbackHosts, stack: contextlib.ExitStack) -> tuple[list[Relay], Path]:
    """A relay before each host, and a config of ssh that goes through them."""
    daemon = dict(line.split(None, 1) for line in (there.folder / "daemon").read_text().splitlines() if line)
    relays = [Relay((HOSTS[name], int(daemon["Port"]))) for name in NAMES]
    for relay in relays:
        stack.callback(relay.close)
    key = (there.folder / "host.pub").read_text()
    known, config = there.folder / "known-relayed", there.folder / "relayed"
    known.write_text("".join(f"{name} {key}" for name in NAMES))
    lines = [f"UserKnownHostsFile {known}"]
    for name, relay in zip(NAMES, relays, strict=True):
        lines += [f"Host {name}", "HostName 127.0.0.1", f"Port {relay.port}", f"HostKeyAlias {name}"]
    config.write_text("\n".join([*lines, "Host *", f"Include {there.config}", ""]))
    return relays, config


def _left(there: LoopbackHosts, before: set[Path]) -> list[str]:
    """Processes that still run for a connection, and the ends of ways back."""
    deadline = time.monotonic() + GIVEN_UP_S
    while (alive := processes.descendants(there.daemon.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"process {pid}" for pid in alive] + [f"{path}" for path in _ways_back() - before]


def _ways_back() -> set[Path]:
    return {path for path in Path("/tmp").glob("meshbook-*") if path.is_socket()}
