"""What a person should know of each name of Monarch that is not here, or is here and does more."""

from __future__ import annotations

INSTEAD: dict[str, str] = {
    "SERVICE_PROC_IDS_ENV": "nothing to pass: hosts know who they are by the ticket that starts them",
    "SERVICE_PROC_RANK_ENV": "nothing to pass, as `SERVICE_PROC_IDS_ENV`",
    "deserialize_service_proc_ids": "nothing to pass, as `SERVICE_PROC_IDS_ENV`",
    "new_service_proc_id": "nothing to pass, as `SERVICE_PROC_IDS_ENV`",
    "ranked_service_proc_id_from_env": "nothing to pass, as `SERVICE_PROC_IDS_ENV`",
    "serialize_service_proc_ids": "nothing to pass, as `SERVICE_PROC_IDS_ENV`",
    "service_proc_addr": "nothing to pass, as `SERVICE_PROC_IDS_ENV`",
    "service_proc_addrs": "nothing to pass, as `SERVICE_PROC_IDS_ENV`",
    "attach": "an engine that reaches the machines, as `--on ssh`; docs/clusters.md",
    "attach_to_workers": "one line with a ticket: `python3 -m meshbook.join`, docs/clusters.md",
    "run_worker_loop_forever": "one line with a ticket: `python3 -m meshbook.join`, docs/clusters.md",
    "run_worker_loop_until_shutdown": "one line with a ticket: `python3 -m meshbook.join`, docs/clusters.md",
    "start_worker_loop_forever": "one line with a ticket: `python3 -m meshbook.join`, docs/clusters.md",
    "LoginJob": "`SSHJob`, or one line with a ticket: `python3 -m meshbook.join`, docs/clusters.md",
    "ProcessState": "nothing: see `LoginJob`",
    "ActorFuture": "`Future`",
    "OpaqueRef": "objects of the ranks: actors, or `meshbook.distributed.remote`",
    "Selection": "`slice` of the mesh, `choose` of an actor",
    "Simulator": "there is none; `ProcessJob` has many hosts on one machine",
    "builtins": "`%mesh logs`, `logging_option`",
    "function_resolvers": "functions are sent as they are",
    "mast_reserve": "jobs of other schedulers: `meshbook.monarch.job`",
    "set_meta": "there is no simulator",
    "RemoteProcessGroup": "`torch.distributed` on the ranks",
    "timer": "`%mesh profile`",
}
"""By name; a name that is missing and not listed is simply not here."""

CUT: dict[str, str] = {
    "ChannelTransport": "transports are chosen, and encrypted between machines",
    "Encoding": "messages have one encoding",
    "PortForwarder": "use `ssh -L` or `kubectl port-forward`",
    "MeshAdminConfig": "the health widget, `procs.status()`",
    "ProcId": "use `id` and `name` of a mesh",
    "TelemetryConfig": "the health widget, `procs.status()`; OpenTelemetry",
    "Uid": "use `id` and `name` of a mesh",
    "debug_controller": "`breakpoint()` opens pdb where the call waits; `%mesh pdb`",
    "enable_transport": "transports are chosen, and encrypted between machines",
    "exec_command": "use `procs.run`, `!command` in a cell, ssh or kubectl",
    "get_meter": "use OpenTelemetry",
    "parametrize_config": "`pytest.mark.parametrize`, and `configured` in the test",
    "parametrize_config_pointwise": "`pytest.mark.parametrize`, and `configured` in the test",
    "returns_future": "use an `async def`",
    "shell": "use ssh or kubectl",
    "span": "use OpenTelemetry, or `torch.profiler.record_function`",
    "traced": "use OpenTelemetry, or `torch.profiler.record_function`",
}
"""By name: what was here, and what to use instead."""

PARTS: dict[str, str] = {
    "configure(NAME=...)": "four settings mean something here and are taken; another name is refused; docs/actors.md",
    "Extent.from_bytes, Extent.to_bytes, Point.from_bytes, Point.to_bytes": "use `pickle`",
    "HostMesh.sync_workspace": "use `procs.sync_workspace()`, or rsync",
    "str(ActorError)": "the exceptions that led to the failure are in `error.__cause__`",
    "Channel.open_ranked()": "`call` of the endpoint, whose answers have ranks",
    "RDMAAction.compare_and_swap, RDMAAction.fetch_add": "an endpoint of an actor, which handles one call at a time",
    "MeshFailure.report()": "its causes and tracebacks, without Monarch's sentence for each actor",
    "ProcMesh.logging_option(aggregate_window_sec=...)": "equal lines of ranks are shown once in a notebook anyway",
}
"""The advice for each part that is cut of a name that stays."""

BETTER: dict[str, str] = {
    "configure": "takes what means something here, and refuses other names; docs/actors.md",
    "JobTrait": "telemetry and mounts are refused, and say what there is",
    "coalescing": "changes nothing: operations are sent in batches anyway",
    "Stream": "a name: operations run in order, and what is borrowed is the tensor",
    "show": "prints; a tensor shows itself at the end of a cell",
    "RDMABuffer": "an interrupt ends a copy; on one host bytes go from memory to memory",
    "ActorError": "every rank that failed, equal causes once, the results of the others in `.partial`",
    "ActorMesh": "`reload()` gives living actors a class that was defined again",
    "Future": "an interrupt reaches the actors; a timeout names who is silent",
    "HostMesh": "can wait for processes, as `meshbook.this_host()` does; lost hosts are started again",
    "ProcMesh": "`hosts.spawn_procs()` makes it; cells, repair, resize, stacks, logs, profiles; docs/magics.md",
    "ValueMesh": "slices with steps, flattening of any slice, values compared by `==`; shown by equal values",
    "get_or_spawn_controller": "in a process of its own, which cannot hold the program up",
    "this_proc": "`spawn` there keeps the program's own classes and globals",
    "unhandled_fault_hook": "does not end the program",
    "endpoint": "plain and async ones in one class",
    "concurrent_endpoint": "beside plain and async ones in one class",
    "Endpoint": "tensors of ranks: `meshbook.distributed.remote`",
    "Extent": "a mapping, hashable",
    "SlurmJob": "one allocation for all names, taken by `salloc`",
    "Point": "hashable, equal to a dict of its coordinates",
}

DIFFERENCES: dict[str, str] = {
    "an_action_whose_copies_overlap": "two copies into one memory are refused, whatever views they were given",
    "tensors: gradients_one_by_one": "gradients, also without a GPU",
    "extent.keys()": "a view of keys, as of any mapping",
    "point.keys()": "a view of keys, as of any mapping",
    'Extent(["a"], [0]).nelements': "a mesh has no axis of size 0",
    'Extent(["a b"], [1])': "axes have names that keyword arguments can have",
    'point == {"h": 1, "g": 1}': "a point is equal to a dict of its coordinates",
    "Point(-1, extent)": "a ValueError, as for other ranks that are not there",
    "Point(7, extent).rank": "a rank that is not there is refused at once",
    'point.get("z")': "None, as of any mapping",
    'Shape(["h"], NDSlice(offset=0, sizes=[1], strides=[3])).ndslice': "an axis of size 1 has stride 0",
    "letters.items() == list(letters.items())": "a list, which can be looked at twice",
    "rows.index(4, 0)": "takes where to begin, as of any sequence",
    "rows[-1]": "counts from the end",
    "letters.item(h=1)": "a ValueError that names the axis",
    "letters.get(-1)": "an IndexError, as for other ranks that are not there",
    "letters.slice(h=1).get(0)": "`get` takes a rank of the whole mesh, also on a part of it",
    'ValueMesh(part, list("abcd")).get(3)': "`get` takes a rank of the whole mesh, also on a part of it",
    "letters.slice(g=slice(0, 3, 2)).values()": "slices with steps",
    'shape.select("g", slice(0, 3, 2))': "slices with steps",
    'letters.slice(g=1).flatten("x").values()': "values can always be flattened",
    'letters == ValueMesh(shape, list("abcdef"))': "values are compared",
    "str(letters)": "equal values in one row: a thousand ranks fit a screen",
    "sparse.nditem([2, 1])": "an index beyond the size of its axis is refused",
    "sparse.nditem([1])": "a ValueError",
    "an_actor_stops_itself": "Monarch's default hook interrupts the program",
}
"""By program: where the answers differ on purpose, and how ours is."""

SOMETIMES = frozenset({"an_actor_stops_itself"})
"""Of these those that are equal in some runs: Monarch's answer depends on what comes first there."""
