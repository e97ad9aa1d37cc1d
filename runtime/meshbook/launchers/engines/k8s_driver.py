"""The driver of Kubernetes: has a Job for each host, and tells what becomes of their pods.

    python -m meshbook.launchers.engines.k8s_driver     what is wanted, a line on stdin; what became of it: `driver_log`

A Job whose agent has ended is removed, once it is told why. The driver removes all of them when it is told to end
(SIGTERM), those that have not started when its controller goes, and ends with the last one when no controller is there.
Pods that run outlive it; another driver finds them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshbook.launchers.engines import k8s_pods
from meshbook.launchers.engines.driver_log import say
from meshbook.launchers.engines.k8s_api import Cluster, ClusterError
from meshbook.launchers.engines.k8s_manifests import HOST_LABEL, NO_CLIENT
from meshbook.launchers.engines.k8s_pods import Pod
from meshbook.system.processes import start_time

TOGETHER = 8
"""How many Jobs are made, or removed, at a time."""
LOOK_S, LONG_LOOK_S = 3, 60
"""How often everything is asked for, while a host waits and when all of them run; changes are told at once."""
AGAIN_S = 1.0
"""How soon an API server that does not answer is asked again."""
POD_S = 2.0
"""How long Kubernetes may take to make a pod before it is asked what is wrong."""
CONNECT_S = 5.0
LINE_BYTES = 1 << 20

_NOT_ALLOWED, GONE = (401, 403), 410
_PASSES = "exceeded quota"
"""Kubernetes makes the pod when others have left."""


def main() -> None:
    """Entry point."""
    driver = JobDriver(json.loads(sys.stdin.buffer.readline()))
    driver.serve()
    driver.end()


class JobHost:
    """A host's Job and its pod. wanted: with ``job`` and ``secret``, unless these are there already."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.id, self.name = str(wanted["id"]), str(wanted["name"])
        self.job, self.secret = wanted.get("job"), wanted.get("secret")
        self.made_at = 0.0
        self.pod: Pod | None = None
        self.started, self.ended = self.job is None, False
        self.warning = self.told = ""

    def tell_waits(self, why: str) -> None:
        text = f"{why}; {self.warning}" if self.warning else why
        if text != self.told:
            say(waits=text, host=self.id)
            self.told = text


class JobDriver:
    """wanted: see `meshbook.launchers.k8s`."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._hosts = {host.name: host for host in map(JobHost, wanted["hosts"])}
        self._group = wanted["group"]
        self._over = self._alone = False
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(TOGETHER)
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._listening = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(wanted["socket"])  # of a driver that was killed
        self._listening.bind(wanted["socket"])
        os.chmod(wanted["socket"], 0o600)
        self._listening.listen()
        try:
            self._cluster = Cluster(wanted["kubeconfig"], wanted["context"], wanted["namespace"])
        except ImportError:
            _fail(NO_CLIENT)
        except ClusterError as error:
            _fail(str(error))
        say(
            group=self._group,
            namespace=self._cluster.namespace,
            context=self._cluster.context,
            socket=wanted["socket"],
            process=f"{os.getpid()} {start_time(os.getpid()) or 0}",
        )

    # ---- its life ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Have the pods, and serve until there is nothing left to be served."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which was held while we started
        for host in self._hosts.values():
            self._pool.submit(self._make, host)
        threading.Thread(target=self._look, daemon=True).start()
        poll = select.poll()
        for each in (0, self._listening.fileno(), self._woken.fileno()):
            poll.register(each, select.POLLIN)
        while not self._over and not (self._alone and all(host.ended for host in self._hosts.values())):
            ready = [fd for fd, _ in poll.poll()]
            if 0 in ready and not os.read(0, 1 << 12):
                poll.unregister(0)
                self._alone = True
                self._end_all(host for host in self._hosts.values() if not host.started)
            if self._listening.fileno() in ready:
                self._hear()
            if self._woken.fileno() in ready:
                self._woken.recv(1 << 12)

    def end(self) -> None:
        """Remove what is left, and end."""
        self._over = True
        self._end_all(self._hosts.values())
        self._pool.shutdown(wait=True)  # each of its calls has a deadline
        os._exit(0)  # one thread waits for what is over

    def _on_term(self, *_: object) -> None:
        self._over = True

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is awake
            self._wake.send(b"\0")

    def _hear(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # whoever asks that is gone already
            sock, _ = self._listening.accept()
            with sock, sock.makefile("rwb") as lines:
                sock.settimeout(CONNECT_S)
                asked = json.loads(lines.readline(LINE_BYTES))
                if "start" in asked:
                    host = JobHost(asked["start"])
                    self._hosts[host.name] = host
                    self._pool.submit(self._make, host)
                else:
                    self._end_all(host for host in self._hosts.values() if host.id == asked["end"])
                lines.write(b"\n")

    # ---- Jobs -------------------------------------------------------------------------------------------------------

    def _make(self, host: JobHost) -> None:
        if host.job is None:
            return
        try:
            if not host.ended:
                self._cluster.create(host.job, host.secret or {})
        except Exception as error:
            self._finish(host, self._cluster.words_of(error))
        host.job = host.secret = None
        host.made_at = time.monotonic()
        if host.ended:  # nobody wants it any more
            self._remove(host)

    def _end_all(self, hosts: Iterable[JobHost]) -> None:
        """Without a word: whoever has asked for that knows why."""
        for host in tuple(hosts):
            with self._lock:
                is_new, host.ended = not host.ended, True
            if is_new:
                self._pool.submit(self._remove, host)

    def _finish(self, host: JobHost, why: str) -> None:
        """A host has ended, or will never start."""
        with self._lock:
            if host.ended:
                return
            host.ended = True
        say(ended=why, host=host.id)
        self._remove(host)
        self._wake_up()

    def _remove(self, host: JobHost) -> None:
        try:
            self._cluster.delete(host.name)
        except Exception as error:
            why = self._cluster.words_of(error)
            print(f"Job {host.name} was not removed from {self._cluster.namespace}: {why}", flush=True)

    # ---- pods -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See what becomes of the pods, to the end."""
        known = False
        while not self._over:
            try:
                pods, since = self._cluster.pods(self._group)
                known = True
                self._see_all(pods)
                waits = any(not (host.started or host.ended) for host in self._hosts.values())
                for is_there, pod in self._cluster.changes(self._group, since, LOOK_S if waits else LONG_LOOK_S):
                    self._see(pod, is_there)
            except Exception as error:
                self._on_no_answer(error, known)
                time.sleep(AGAIN_S)

    def _on_no_answer(self, error: Exception, known: bool) -> None:
        if getattr(error, "status", None) == GONE:
            return  # they are listed again
        said = self._cluster.words_of(error)
        hopeless = not known or getattr(error, "status", None) in _NOT_ALLOWED
        for host in tuple(self._hosts.values()):
            if not host.started and not host.ended:
                if hopeless:
                    self._finish(host, said)
                else:
                    host.tell_waits(said)

    def _see_all(self, pods: list[Pod]) -> None:
        for pod in pods:
            self._see(pod, True)
        there = {pod["metadata"]["labels"].get(HOST_LABEL) for pod in pods}
        for host in tuple(self._hosts.values()):
            if host.ended or (host.started and host.name in there):
                continue
            if host.name in there:
                self._ask_why(host, k8s_pods.name_of(host.pod or {}))
            elif host.pod is not None:
                self._finish(host, k8s_pods.deleted(k8s_pods.place_of(host.pod)))
            elif host.started:
                self._finish(host, k8s_pods.deleted("its pod"))
            elif host.job is None and time.monotonic() - host.made_at > POD_S:
                self._ask_why(host, host.name)

    def _see(self, pod: Pod, is_there: bool) -> None:
        host = self._hosts.get(pod["metadata"]["labels"].get(HOST_LABEL, ""))
        if host is None or host.ended:
            return
        host.pod = pod
        if why := k8s_pods.why_ended(pod):
            if why.startswith("its agent"):
                container = pod["spec"]["containers"][0]["name"]
                why = k8s_pods.why_ended(pod, self._cluster.log_tail(k8s_pods.name_of(pod), container))
            self._finish(host, why)
        elif not is_there:
            self._finish(host, k8s_pods.deleted(k8s_pods.place_of(pod)))
        elif why := k8s_pods.cannot_start(pod):
            self._finish(host, why)
        elif k8s_pods.runs(pod):
            if not host.started:
                host.started = True
                say(node=k8s_pods.place_of(pod), host=host.id)
        else:
            host.tell_waits(k8s_pods.waits_for(pod))

    def _ask_why(self, host: JobHost, name: str) -> None:
        """Why a host has no pod, or its pod does not start."""
        if host.pod is not None and not host.pod.get("spec", {}).get("nodeName"):
            return  # the scheduler says so in the pod
        host.warning = self._cluster.last_warning(name)
        if host.pod is None and "is forbidden" in host.warning and _PASSES not in host.warning:
            self._finish(host, f"Kubernetes makes no pod for it: {host.warning}")
        elif host.pod is None:
            host.tell_waits("Kubernetes has made no pod for it yet")
        else:
            host.tell_waits(k8s_pods.waits_for(host.pod))


def _fail(why: str) -> None:
    say(ended=why)
    os._exit(1)


if __name__ == "__main__":
    main()
