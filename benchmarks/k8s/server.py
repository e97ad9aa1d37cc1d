"""A stand-in for a Kubernetes API server with its controllers: the few paths that are used here, over real HTTP.

It makes a pod for each Job, gives it a node with GPUs enough, ends what belongs to a Job with it, keeps versions for
watches, and refuses as Kubernetes does, with a Status. It checks no manifest (`kubernetes-validate` does), has no
admission but a quota of pods, does not start Jobs again or remove those that have ended, and knows two users:
``admin``, and ``reader`` who may only look.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACES = ("default", "ml", "full")
"""In ``full`` a quota allows no pod."""

Body = dict[str, Any]


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        self.code = code
        self.status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
        self.status["message"] = message


class Store:
    """Objects by kind, namespace and name; and what has happened to pods, in order."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Body] = {}
        self.events: list[tuple[int, str, Body]] = []
        self.changed = threading.Condition(threading.RLock())
        self.version, self.over = 1, False
        self.log: Callable[[str], str] = lambda pod: ""
        """What a container has said, by its pod."""

    def put(self, kind: str, body: Body, event: str = "MODIFIED") -> Body:
        with self.changed:
            self.version += 1
            body["metadata"]["resourceVersion"] = str(self.version)
            self.objects[kind, body["metadata"].get("namespace", ""), body["metadata"]["name"]] = body
            if kind == "pods":
                self.events.append((self.version, event, copy.deepcopy(body)))
            self.changed.notify_all()
            return body

    def is_past(self, version: int) -> bool:
        """Whether something has changed since, or it is over."""
        return self.version > version or self.over

    def get(self, kind: str, namespace: str, name: str) -> Body:
        with self.changed:
            try:
                return self.objects[kind, namespace, name]
            except KeyError:
                named = "jobs.batch" if kind == "jobs" else kind
                raise Refused(404, "NotFound", f'{named} "{name}" not found') from None

    def listed(self, kind: str, namespace: str = "") -> list[Body]:
        with self.changed:
            return [
                body for (of, at, _), body in self.objects.items() if of == kind and (not namespace or at == namespace)
            ]

    def create(self, kind: str, namespace: str, body: Body) -> Body:
        with self.changed:
            name = body["metadata"]["name"]
            if namespace and namespace not in NAMESPACES:
                raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
            if (kind, namespace, name) in self.objects:
                raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
            uid = str(uuid.uuid4())
            body["metadata"] |= {"uid": uid, "namespace": namespace, "creationTimestamp": now()}
            for key, text in body.pop("stringData", {}).items():
                body.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
            self.put(kind, body, "ADDED")
            if kind == "jobs":
                self._make_pod(body)
            return body

    def delete(self, kind: str, namespace: str, name: str, now_at_once: bool = False) -> Body:
        with self.changed:
            body = self.get(kind, namespace, name)
            if kind == "pods" and body["spec"].get("nodeName") and not now_at_once and not is_over(body):
                body["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 10}
                return self.put(kind, body)
            del self.objects[kind, namespace, name]
            if kind == "pods":
                self.version += 1
                self.events.append((self.version, "DELETED", copy.deepcopy(body)))
                self._schedule()
            self.changed.notify_all()
            for (of, at, other), owned in tuple(self.objects.items()):
                owners = owned["metadata"].get("ownerReferences", [])
                if any(owner["uid"] == body["metadata"].get("uid") for owner in owners):
                    self.delete(of, at, other)
            return body

    def patch(self, kind: str, namespace: str, name: str, body: Body) -> Body:
        with self.changed:
            found = self.get(kind, namespace, name)
            found.setdefault("status", {}).update(body["status"])
            self.put(kind, found)
            self._schedule()
            return found

    # ---- controllers ------------------------------------------------------------------------------------------------

    def _make_pod(self, job: Body) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        if namespace == "full":
            message = f'Error creating: pods "{name}-x" is forbidden: exceeded quota: none, requested: pods=1'
            event = {"metadata": {"name": f"{name}.1"}, "type": "Warning", "reason": "FailedCreate", "message": message}
            self.create("events", namespace, {**event, "involvedObject": {"name": name}, "lastTimestamp": now()})
            return
        template = copy.deepcopy(job["spec"]["template"])
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        metadata = {**template["metadata"], "name": f"{name}-{uuid.uuid4().hex[:5]}", "ownerReferences": [owner]}
        pod = {"metadata": metadata, "spec": template["spec"], "status": {"phase": "Pending"}}
        self.create("pods", namespace, {"kind": "Pod", "apiVersion": "v1", **pod})
        self._schedule()

    def _schedule(self) -> None:
        """Give pods that have none a node with so many GPUs free, those with few pods first."""
        nodes = self.listed("nodes")
        for pod in [pod for pod in self.listed("pods") if "nodeName" not in pod["spec"]]:
            there = [other for other in self.listed("pods") if "nodeName" in other["spec"] and not is_over(other)]
            able = [
                node for node in nodes
                if gpus_of(pod) + sum(map(gpus_of, on(node, there))) <= has_gpus(node)
            ]  # fmt: skip
            if able:
                pod["spec"]["nodeName"] = min(able, key=lambda node: len(on(node, there)))["metadata"]["name"]
                pod["status"].pop("conditions", None)
                self.put("pods", pod)
            elif "conditions" not in pod["status"]:
                why = f"0/{len(nodes)} nodes are available: {len(nodes)} Insufficient nvidia.com/gpu."
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
                pod["status"]["conditions"] = [condition]
                self.put("pods", pod)


def on(node: Body, pods: list[Body]) -> list[Body]:
    return [pod for pod in pods if pod["spec"]["nodeName"] == node["metadata"]["name"]]


def has_gpus(node: Body) -> int:
    return int(node.get("status", {}).get("capacity", {}).get("nvidia.com/gpu", -1))


def gpus_of(pod: Body) -> int:
    return int(pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))


def is_over(pod: Body) -> bool:
    return pod["status"].get("phase") in ("Failed", "Succeeded")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def selects(selector: str, labels: Body) -> bool:
    pairs = [part.partition("=") for part in selector.split(",") if part]
    return all(labels.get(name) == value for name, _, value in pairs)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        try:
            self._serve(url.path.strip("/").split("/"), query, json.loads(body) if body else {})
        except Refused as refused:
            self._send(refused.code, refused.status)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer

    def _serve(self, path: list[str], query: dict[str, str], body: Body) -> None:
        path = path[3:] if path[0] == "apis" else path[2:]  # without group and version
        namespace = path[1] if path[0] == "namespaces" else ""
        kind, *rest = path[2:] if namespace else path
        self._authorize(kind, namespace)
        store = self.store
        if self.command == "POST":
            self._send(201, store.create(kind, namespace, body))
        elif self.command == "PATCH":
            self._send(200, store.patch(kind, namespace, rest[0], body))
        elif self.command == "DELETE":
            grace = query.get("gracePeriodSeconds", body.get("gracePeriodSeconds"))
            self._send(200, store.delete(kind, namespace, rest[0], str(grace) == "0"))
        elif rest[1:] == ["log"]:
            self._send_text(store.log(store.get(kind, namespace, rest[0])["metadata"]["name"]))
        elif rest:
            self._send(200, store.get(kind, namespace, rest[0]))
        elif query.get("watch"):
            self._watch(namespace, query)
        else:
            with store.changed:
                items = [each for each in store.listed(kind, namespace) if self._wanted(each, query)]
                answer = {"items": items, "metadata": {"resourceVersion": str(store.version)}}
                self._send(200, {"kind": "List", "apiVersion": "v1", **answer})

    def _authorize(self, kind: str, namespace: str) -> None:
        user = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if user not in ("admin", "reader"):
            raise Refused(401, "Unauthorized", "Unauthorized")
        if user == "reader" and self.command != "GET":
            group = "batch" if kind == "jobs" else ""
            named = (
                f'{kind}{group and ".batch"} is forbidden: User "reader" cannot create resource "{kind}" in API group '
            )
            raise Refused(403, "Forbidden", f'{named}"{group}" in the namespace "{namespace}"')

    def _wanted(self, body: Body, query: dict[str, str]) -> bool:
        field = query.get("fieldSelector", "").partition("=")
        if field[2] and body.get("involvedObject", {}).get("name") != field[2]:
            return False
        return selects(query.get("labelSelector", ""), body["metadata"].get("labels", {}))

    def _send(self, code: int, body: Body) -> None:
        with self.store.changed:
            data = json.dumps(body).encode()
        self._send_data(code, data, "application/json")

    def _send_text(self, text: str) -> None:
        self._send_data(200, text.encode(), "text/plain")

    def _send_data(self, code: int, data: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _watch(self, namespace: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event, pod in self._changes(query):
            if namespace in ("", pod["metadata"]["namespace"]) and self._wanted(pod, query):
                self._send_chunk(json.dumps({"type": event, "object": pod}).encode() + b"\n")
        self._send_chunk(b"")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _changes(self, query: dict[str, str]) -> Iterator[tuple[str, Body]]:
        store, ends = self.store, time.monotonic() + int(query.get("timeoutSeconds", 30))
        since = query.get("resourceVersion")
        with store.changed:
            there = [] if since else [("ADDED", copy.deepcopy(pod)) for pod in store.listed("pods")]
            seen = int(since) if since else store.version
        yield from there
        while (left := ends - time.monotonic()) > 0 and not store.over:
            with store.changed:
                store.changed.wait_for(functools.partial(store.is_past, seen), left)
                new = [each for each in store.events if each[0] > seen]
                seen = store.version
            yield from ((event, pod) for _, event, pod in new)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.serving.add(threading.current_thread())
        super().process_request_thread(request, client_address)

    serving: set[threading.Thread] = set()

    def end(self, store: Store) -> None:
        """Clients have gone."""
        self.shutdown()
        self.server_close()
        with store.changed:
            store.over = True
            store.changed.notify_all()
        for thread in self.serving:
            thread.join(30)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client has gone in the middle of a watch


def start(store: Store) -> Server:
    """Serve on loopback."""
    handler = type("StoreHandler", (Handler,), {"store": store})
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
