"""What `meshbook.config.configure` sets: under Monarch's names, for this process, until it ends.

Monarch has a name for each part of its own machinery. Those that mean something here are in `DEFAULTS`; the others are
taken and given back, and a warning says that they change nothing, so that a program which sets them runs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean

DEFAULTS: dict[str, object] = {
    "enable_log_forwarding": True,
    "host_spawn_ready_timeout": "1m",
    "mesh_proc_spawn_max_idle": "2m",
}
"""Whether meshes that are spawned from now on show what calls print; how long a host agent may take to dial in; how
long workers may take to answer, with the imports of ``preload`` and the bootstrap."""

_WITHOUT_MEANING = frozenset(
    """
    actor_spawn_max_idle channel_net_rx_buffer_full_check_interval channel_reconnect_timeout channel_tcp_congestion
    channel_tcp_keepalive_idle cleanup_timeout codec_max_frame_length default_encoding default_transport
    enable_dest_actor_reordering_buffer enable_file_capture enable_otel_metrics enable_otel_tracing
    enable_recorder_tracing enable_sqlite_tracing enable_unawaited_python_task_traceback file_log_level force_file_log
    forwarder_flush_timeout get_actor_state_max_idle get_proc_state_max_idle max_cast_dimension_size max_cast_fanout
    mesh_admin_addr mesh_attach_config_timeout mesh_bootstrap_enable_pdeathsig mesh_orphan_timeout
    mesh_terminate_concurrency mesh_terminate_timeout message_ack_every_n_messages message_ack_time_interval
    message_delivery_timeout message_latency_sampling_rate message_ttl_default monarch_log_suffix
    otel_metric_export_interval pending_actor_delivery_timeout prefix_with_rank proc_launcher_kind proc_stop_max_idle
    process_exit_timeout process_memory_metric_interval pyspy_bin rdma_allow_tcp_fallback rdma_cq_poller_per_device
    rdma_disable_ibverbs rdma_host_odp rdma_ibverbs_target rdma_max_chunk_size_mb rdma_max_nics_per_buffer
    rdma_min_stripe_size_kb rdma_peer_device_affinity rdma_qp_init_timeout rdma_qps_per_cq rdma_qps_per_peer
    rdma_runtime_worker_threads rdma_tcp_fallback_parallelism read_log_buffer remote_alloc_allowed_port_range
    remote_alloc_bind_to_inaddr_any remote_alloc_bootstrap_addr scuba_log_enter_exit sequencer_max_locked_keys
    server_heartbeat_interval small_write_threshold split_max_buffer_age split_max_buffer_size stop_actor_timeout
    stop_grace_period supervision_watchdog_timeout tail_log_lines terminated_snapshot_retention tokio_worker_threads
    use_direct_spawn
    """.split()  # noqa: SIM905
)

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")

_set: dict[str, object] = {}


def configure(**settings: object) -> None:
    """Set what the names say for this process: how long to wait, what to show.

    settings: durations are texts, as in ``30s`` or ``1h 30m``.
    Raises: UsageError for a name that Monarch has not either, and for a value that does not fit; then nothing is set.
    """
    for name, value in settings.items():
        if name in DEFAULTS:
            _check(name, value)
        elif name not in _WITHOUT_MEANING and not name.startswith("mesh_admin_"):
            raise UsageError(f"there is no setting {name}.{did_you_mean(name, (*DEFAULTS, *_WITHOUT_MEANING))}")
    if idle := sorted(settings.keys() - DEFAULTS):
        warnings.warn(f"{', '.join(idle)}: set, as in Monarch, but of no meaning here", stacklevel=2)
    _set.update(settings)


def get_runtime_config() -> dict[str, object]:
    """What `configure` has set."""
    return dict(_set)


def get_global_config() -> dict[str, object]:
    """The same, with the defaults of what was not set."""
    return {**DEFAULTS, **_set}


def clear_runtime_config() -> None:
    """Go back to the defaults."""
    _set.clear()


def restore(settings: Mapping[str, object]) -> None:
    """Have exactly these set, which were checked as they were set first."""
    _set.clear()
    _set.update(settings)


def setting_s(name: str) -> float:
    """A duration, in seconds."""
    return _seconds(_set.get(name, DEFAULTS[name]))


def shows_calls() -> bool:
    """Whether new meshes show what calls print."""
    return bool(_set.get("enable_log_forwarding", True))


def _check(name: str, value: object) -> None:
    """Raises: UsageError."""
    if isinstance(DEFAULTS[name], bool):
        if not isinstance(value, bool):
            raise UsageError(f"{name} is True or False, not {value!r}.")
    elif not _seconds(value) > 0:
        raise UsageError(f'{name} is a duration above 0, as in "30s" or "1m 30s", not {value!r}.')


def _seconds(duration: object) -> float:
    """0 for what is none."""
    parts = _PART.findall(duration) if isinstance(duration, str) and _PART.sub("", duration) == "" else []
    if not all(unit in _UNITS_S for _, unit in parts):
        return 0.0
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)
