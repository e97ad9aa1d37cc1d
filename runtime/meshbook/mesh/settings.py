"""What `meshbook.config.configure` sets: under Monarch's names, for this process, until it ends.

Monarch has a name for each part of its own machinery. Those that mean something here are in `DEFAULTS`; the others are
taken and given back, with Monarch's defaults, and a warning says that they change nothing, so that a program which sets
them runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from meshbook.actor.identifiers import enabled_transport
from meshbook.actor.identity import limit_messages
from meshbook.actor.proc_ref import ask_controller
from meshbook.actor.router import is_rank
from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook.mesh.setting_values import Encoding, SettingTypeError, checked, duration_ns

DEFAULTS: dict[str, object] = {
    "codec_max_frame_length": 10 * 2**30,
    "enable_log_forwarding": True,
    "host_spawn_ready_timeout": "1m",
    "mesh_proc_spawn_max_idle": "2m",
}
"""How many bytes the arguments of a call to actors may have, once it was set: there is no limit by default.

Whether meshes that are spawned from now on show what calls print; how long a host agent may take to dial in; how long
workers may take to answer, with the imports of ``preload`` and the bootstrap.
"""

_DURATIONS = """
    actor_spawn_max_idle=30s channel_net_rx_buffer_full_check_interval=5s channel_reconnect_timeout=1m
    channel_tcp_keepalive_idle=1m cleanup_timeout=3s forwarder_flush_timeout=5s get_actor_state_max_idle=30s
    get_proc_state_max_idle=1m mesh_admin_config_dump_bridge_timeout=5s mesh_admin_pyspy_bridge_timeout=13s
    mesh_admin_pyspy_client_timeout=20s mesh_admin_pyspy_max_profile_duration=5m mesh_admin_pyspy_timeout=10s
    mesh_admin_query_child_timeout=100ms mesh_admin_resolve_actor_timeout=200ms mesh_admin_single_host_timeout=3s
    mesh_admin_tree_timeout=10s mesh_attach_config_timeout=1m mesh_orphan_timeout=1m mesh_terminate_timeout=10s
    message_ack_time_interval=500ms message_delivery_timeout=30s otel_metric_export_interval=1s
    pending_actor_delivery_timeout=30s proc_stop_max_idle=30s process_exit_timeout=10s process_memory_metric_interval=5m
    rdma_qp_init_timeout=30s server_heartbeat_interval=1s split_max_buffer_age=50ms stop_actor_timeout=10s
    stop_grace_period=10s supervision_watchdog_timeout=2m
"""
_COUNTS = """
    max_cast_dimension_size=16 max_cast_fanout=16
    mesh_admin_max_concurrent_resolves=2 mesh_terminate_concurrency=16 message_ack_every_n_messages=1000
    message_ttl_default=64 rdma_max_chunk_size_mb=64 rdma_min_stripe_size_kb=512 rdma_qps_per_cq=64 rdma_qps_per_peer=4
    rdma_runtime_worker_threads=4 rdma_tcp_fallback_parallelism=1 read_log_buffer=100
    sequencer_max_locked_keys=128 small_write_threshold=256
    split_max_buffer_size=5 tail_log_lines=0 terminated_snapshot_retention=100
"""
_SWITCHES_ON = """
    enable_dest_actor_reordering_buffer enable_otel_metrics enable_otel_tracing enable_recorder_tracing
    mesh_bootstrap_enable_pdeathsig prefix_with_rank rdma_allow_tcp_fallback rdma_cq_poller_per_device
"""
_SWITCHES_OFF = """
    enable_file_capture enable_sqlite_tracing enable_unawaited_python_task_traceback force_file_log
    rdma_disable_ibverbs rdma_host_odp scuba_log_enter_exit use_direct_spawn
"""
_TEXTS = """
    channel_tcp_congestion file_log_level monarch_log_suffix proc_launcher_kind pyspy_bin rdma_ibverbs_target
    rdma_peer_device_affinity
"""


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (each.partition("=") for each in text.split())]


_WITHOUT_MEANING: dict[str, object] = {
    **dict(_pairs(_DURATIONS)),
    **{name: int(value) for name, value in _pairs(_COUNTS)},
    **dict.fromkeys(_SWITCHES_ON.split(), True),
    **dict.fromkeys(_SWITCHES_OFF.split(), False),
    **dict.fromkeys(_TEXTS.split(), ""),
    "default_encoding": Encoding.Multipart,
    "mesh_admin_addr": "[::]:1729",
    "message_latency_sampling_rate": 0.01,
    "rdma_max_nics_per_buffer": None,
    "tokio_worker_threads": None,
}
"""By name: the default that it has in Monarch."""

_FORMER = {"actor_queue_dispatch": True}
"""Of other versions of Monarch: taken, and not told of until it is set."""

_set: dict[str, object] = {}


def configure(**settings: object) -> None:
    """Set what the names say for this process: how long to wait, what to show.

    settings: durations are texts, as in ``30s`` or ``1h 30m``.
    Raises: UsageError for a name that Monarch has not either, SettingTypeError, a TypeError too, for a value that does
    not fit; then nothing is set.
    """
    known = {**_WITHOUT_MEANING, **_FORMER, **DEFAULTS, "default_transport": enabled_transport()}
    kept: dict[str, object] = {}
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"there is no setting {name}.{did_you_mean(name, tuple(known))}")
        kept[name] = checked(name, value, known[name])
        if name in DEFAULTS and isinstance(DEFAULTS[name], str) and not duration_ns(name, value):
            raise SettingTypeError(f'{name} is a duration above 0, as in "30s" or "1m 30s", not {value!r}.')
    if idle := sorted(settings.keys() - DEFAULTS):
        warnings.warn(f"{', '.join(idle)}: set, as in Monarch, but of no meaning here", stacklevel=2)
    _set.update(kept)
    _hold()


def _hold() -> None:
    """Have what is set hold where it is not asked for."""
    limit = _set.get("codec_max_frame_length")
    limit_messages(limit if isinstance(limit, int) else None)


def get_runtime_config() -> dict[str, object]:
    """What `configure` has set."""
    return dict(_set)


def get_global_config() -> dict[str, object]:
    """The same, with the defaults of what was not set; on a rank those are what the program has set, where it has."""
    defaults = {**_WITHOUT_MEANING, **DEFAULTS, "default_transport": enabled_transport()}
    if is_rank():
        defaults |= ask_controller("settings", (), {}, "config").get()
    return {**defaults, **_set}


def clear_runtime_config() -> None:
    """Go back to the defaults."""
    restore({})


def restore(settings: Mapping[str, object]) -> None:
    """Have exactly these set, which were checked as they were set first."""
    _set.clear()
    _set.update(settings)
    _hold()


def setting_s(name: str) -> float:
    """A duration, in seconds."""
    return duration_ns(name, _set.get(name, DEFAULTS[name])) / 1e9


def shows_calls() -> bool:
    """Whether new meshes show what calls print."""
    return bool(_set.get("enable_log_forwarding", True))
