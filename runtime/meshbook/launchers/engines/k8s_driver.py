"""The driver of Kubernetes: has a Job for each host, and reports the fates of their pods.

    python -m meshbook.launchers.engines.k8s_driver     gets the order of `meshbook.launchers.k8s` by stdin

A Job whose agent has ended is removed, once it is told why. The driver removes all of them when it is told to end
(SIGTERM), the Jobs that have not started when its controller goes, and ends with the last one when no controller is
there. Pods that run outlive it; another driver finds them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshbook.launchers.engines.driver import Driver, fail, say
from meshbook.launchers.engines.k8s_cluster import Cluster, ClusterError, Pod
from meshbook.launchers.engines.k8s_manifests import NO_CLIENT
from meshbook.system.processes import start_time

TOGETHER = 8
"""The number of Jobs that are made, or removed, at a time."""
LOOK_S, LONG_LOOK_S = 3, 60
"""The seconds between two lists of all pods, while a host waits and when all run; changes come at once."""
AGAIN_S = 1.0
"""The pause before an API server that did not answer is asked again."""
POD_S = 2.0
"""The time that Kubernetes has to make a pod before it is asked for its complaints."""

_NOT_ALLOWED, GONE = (401, 403), 410
_PASSES = "exceeded quota"
"""A complaint after which Kubernetes makes the pod all the same, when others have left."""


class JobHost:
    """A host's Job and its pod. wanted: with ``job`` and ``secret``, unless these are there already."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.id, self.name = str(wanted["id"]), str(wanted["name"])
        self.job, self.secret = wanted.get("job"), wanted.get("secret")
        self.made_at = 0.0
        self.pod: Pod | None = None
        self.started, self.ended = self.job is None, False
        self.warning = self.told = ""

    def see(self, pod: Pod) -> None:
        self.pod = pod

    def tell_waits(self, why: str) -> None:
        text = f"{why}; {self.warning}" if self.warning else why
        if text != self.told:
            say(waits=text, host=self.id)
            self.told = text


class JobDriver(Driver):
    """wanted: see `meshbook.launchers.k8s`."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        super().__init__(wanted["socket"])
        self._hosts = {host.name: host for host in map(JobHost, wanted["hosts"])}
        self._group = wanted["group"]
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(TOGETHER)
        try:
            self._cluster = Cluster(wanted["kubeconfig"], wanted["context"], wanted["namespace"])
        except ImportError:
            fail(NO_CLIENT)
        except ClusterError as error:
            fail(str(error))
        say(
            group=self._group,
            namespace=self._cluster.namespace,
            context=self._cluster.context,
            socket=wanted["socket"],
            process=f"{os.getpid()} {start_time(os.getpid()) or 0}",
        )

    # ---- its life ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for host in self._hosts.values():
            self._pool.submit(self._make, host)
        threading.Thread(target=self._look, daemon=True).start()

    def is_done(self) -> bool:
        return all(host.ended for host in self._hosts.values())

    def on_alone(self) -> None:
        self._end_all(host for host in self._hosts.values() if not host.started)

    def on_request(self, request: dict[str, Any]) -> None:
        if "start" in request:
            host = JobHost(request["start"])
            self._hosts[host.name] = host
            self._pool.submit(self._make, host)
        else:
            self._end_all(host for host in self._hosts.values() if host.id == request["end"])

    def end(self) -> None:
        """Remove the remaining Jobs, and end."""
        self._is_over = True
        self._end_all(self._hosts.values())
        self._pool.shutdown(wait=True)  # each of its calls has a deadline
        os._exit(0)  # one thread waits for what is over

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
        """End hosts without a word: the controller, which has asked for that, knows why."""
        for host in tuple(hosts):
            with self._lock:
                is_new, host.ended = not host.ended, True
            if is_new:
                self._pool.submit(self._remove, host)

    def _finish(self, host: JobHost, why: str) -> None:
        """Note that a host has ended, or will never start, and remove its Job."""
        with self._lock:
            if host.ended:
                return
            host.ended = True
        say(ended=why, host=host.id)
        self._remove(host)
        self.wake_up()

    def _remove(self, host: JobHost) -> None:
        try:
            self._cluster.delete(host.name)
        except Exception as error:
            why = self._cluster.words_of(error)
            print(f"Job {host.name} was not removed from {self._cluster.namespace}: {why}", flush=True)

    # ---- pods -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Follow the pods until the driver ends."""
        known = False
        while not self._is_over:
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
        there = {pod.host for pod in pods}
        for host in tuple(self._hosts.values()):
            if host.ended or (host.started and host.name in there):
                continue
            if host.name in there:
                self._ask_why(host, host.pod.name if host.pod is not None else host.name)
            elif host.pod is not None or host.started:
                self._finish(host, f"{host.pod.place if host.pod is not None else 'its pod'} was deleted")
            elif host.job is None and time.monotonic() - host.made_at > POD_S:
                self._ask_why(host, host.name)

    def _see(self, pod: Pod, is_there: bool) -> None:
        host = self._hosts.get(pod.host)
        if host is None or host.ended:
            return
        host.see(pod)
        ended = pod.why_ended(is_there, lambda: self._cluster.log_tail(pod.name, pod.container))
        if why := ended or pod.cannot_start():
            self._finish(host, why)
        elif pod.runs:
            if not host.started:
                host.started = True
                say(node=pod.place, host=host.id)
        else:
            host.tell_waits(pod.waits_for())

    def _ask_why(self, host: JobHost, name: str) -> None:
        """Ask Kubernetes why a host has no pod, or why its pod does not start."""
        if host.pod is not None and not host.pod.node:
            return  # the scheduler says so in the pod
        host.warning = self._cluster.last_warning(name)
        if host.pod is not None:
            host.tell_waits(host.pod.waits_for())
        elif "is forbidden" in host.warning and _PASSES not in host.warning:
            self._finish(host, f"Kubernetes makes no pod for it: {host.warning}")
        else:
            host.tell_waits("Kubernetes has made no pod for it yet")


if __name__ == "__main__":
    driver = JobDriver(json.loads(sys.stdin.buffer.readline()))
    driver.serve()
    driver.end()
