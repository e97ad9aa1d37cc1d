"""Settings of the process, by Monarch's names."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, ChannelTransport, SupervisionError, enable_transport, endpoint, identifiers
from meshbook.actor.identifiers import BindSpec
from meshbook.config import (
    Encoding,
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
    parametrize_config,
    parametrize_config_pointwise,
)
from meshbook.errors import SpawnError, UsageError

pytestmark = pytest.mark.monarch


def test_settings_hold_in_the_block() -> None:
    configure(mesh_proc_spawn_max_idle="1m 30s")
    with configured(host_spawn_ready_timeout="500ms") as settings:
        assert settings == get_global_config()
        named = ("enable_log_forwarding", "host_spawn_ready_timeout", "mesh_proc_spawn_max_idle")
        assert [settings[name] for name in named] == [True, "500ms", "1m 30s"]
    assert get_runtime_config() == {"mesh_proc_spawn_max_idle": "1m 30s"}
    clear_runtime_config()
    assert get_runtime_config() == {}
    assert get_global_config()["mesh_proc_spawn_max_idle"] == "2m"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mesh_proc_spawn_max_idl": "1s"}, 'Did you mean "mesh_proc_spawn_max_idle"'),
        ({"mesh_proc_spawn_max_idle": "soon"}, "Invalid duration format 'soon'"),
        ({"mesh_proc_spawn_max_idle": "30"}, "Invalid duration format '30' .* with units"),
        ({"mesh_proc_spawn_max_idle": "3 fortnights"}, "Invalid duration format"),
        ({"mesh_proc_spawn_max_idle": 3}, "is a duration, a text"),
        ({"mesh_proc_spawn_max_idle": "0s"}, "a duration above 0"),
        ({"enable_log_forwarding": "no"}, "is True or False"),
        ({"cleanup_timeout": 3}, "cleanup_timeout is a duration, a text"),
        ({"tail_log_lines": 1.5}, "tail_log_lines is a count"),
        ({"tail_log_lines": -1}, "a count from 0, not -1"),
        ({"message_latency_sampling_rate": "x"}, "is a number"),
        ({"default_encoding": "bincode"}, "is an Encoding"),
        ({"default_transport": 42}, "a transport is a ChannelTransport or a text"),
        ({"default_transport": "pigeon://x"}, "a transport is tcp, ipc"),
        ({"pyspy_bin": 3}, "is a text"),
        ({"tokio_worker_threads": "x"}, "is a count"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_set(settings: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        configure(host_spawn_ready_timeout="2s", **settings)
    assert get_runtime_config() == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("90s", "1m 30s"),
        ("1h30m", "1h 30m"),
        ("1500ms", "1s 500ms"),
        ("1.5s", "1s 500ms"),
        ("8d", "8days"),
        ("1w 1day", "8days"),
        ("5 m", "5m"),
        ("0s", "0s"),
        ("1y 2M", "1year 2months"),
    ],
)
def test_durations_are_told_as_monarch_tells_them(given: str, told: str) -> None:
    with pytest.warns(UserWarning, match="of no meaning"), configured(cleanup_timeout=given) as settings:
        assert settings["cleanup_timeout"] == told


def test_every_setting_of_monarch_has_its_default() -> None:
    settings = get_global_config()
    assert settings["default_encoding"] is Encoding.Multipart
    assert str(Encoding.Json) == "Encoding.Json"
    assert (settings["supervision_watchdog_timeout"], settings["message_ttl_default"]) == ("2m", 64)
    assert (settings["prefix_with_rank"], settings["tokio_worker_threads"]) == (True, None)
    with pytest.raises(TypeError):
        configure(default_encoding=123)


seen: list[tuple[object, object]] = []


@pytest.mark.filterwarnings("ignore:.*of no meaning")
@parametrize_config(force_file_log=[True, False], tail_log_lines=[1, 2])
def test_runs_with_every_combination(tmp_path: Path) -> None:
    settings = get_global_config()
    seen.append((settings["force_file_log"], settings["tail_log_lines"]))
    assert len(set(seen)) == len(seen)
    assert tmp_path.is_dir()


@pytest.mark.filterwarnings("ignore:.*of no meaning")
@parametrize_config_pointwise(force_file_log=[True, False], tail_log_lines=[3, 4])
def test_runs_with_one_after_the_other() -> None:
    settings = get_global_config()
    assert (settings["force_file_log"], settings["tail_log_lines"]) in [(True, 3), (False, 4)]


def test_a_coroutine_runs_within_its_settings() -> None:
    async def steps(_: int) -> object:
        return get_global_config()["enable_log_forwarding"]

    test = parametrize_config(enable_log_forwarding=[False])(steps)
    assert asyncio.run(test({"enable_log_forwarding": False}, 1)) is False
    assert asyncio.run(steps(1)) is True


def test_settings_to_try_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="name a setting"):
        parametrize_config()
    with pytest.raises(ValueError, match=r"as many values, not \{'a': 1, 'b': 2\}"):
        parametrize_config_pointwise(a=[1], b=[1, 2])


def test_settings_without_meaning_are_kept_and_told_of() -> None:
    told = "rdma_max_chunk_size_mb, tail_log_lines: set, as in Monarch, but of no meaning"
    with pytest.warns(UserWarning, match=told), configured(tail_log_lines=3, rdma_max_chunk_size_mb=1) as settings:
        assert settings["tail_log_lines"] == 3


def test_processes_have_so_long_to_come_up() -> None:
    with (
        configured(mesh_proc_spawn_max_idle="1s"),
        pytest.raises(SpawnError, match=r"no progress for 1 s while .*: rank 0 has not answered"),
    ):
        this_host().spawn_procs({"gpus": 1}, _sleep, torch=False)


def _sleep() -> None:
    time.sleep(60)


def test_meshes_are_silent_until_they_are_told_otherwise(capfd: pytest.CaptureFixture[str]) -> None:
    with configured(enable_log_forwarding=False):
        procs = this_host().spawn_procs({"gpus": 1}, torch=False)
    procs.run("print('not shown')").get(60)
    procs.logging_option(stream_to_client=True).get(60)
    procs.run("print('shown')").get(60)
    procs.stop()
    assert capfd.readouterr().out == "[0] shown\n"


class Asker(Actor):
    @endpoint
    def ask(self, own: str) -> tuple[object, object]:
        with configured(**({"pyspy_bin": own} if own else {})) as settings:
            return settings["rdma_ibverbs_target"], settings["pyspy_bin"]


@pytest.mark.filterwarnings("ignore:.*of no meaning")
def test_ranks_are_told_what_the_program_has_set(mesh4: ProcMesh) -> None:
    asker = mesh4.slice(gpus=0).spawn("asker", Asker)
    assert asker.ask.call_one("").get(60) == ("", "")
    with configured(rdma_ibverbs_target="nic:a", pyspy_bin="/bin/a"):
        assert asker.ask.call_one("").get(60) == ("nic:a", "/bin/a")
        assert asker.ask.call_one("/bin/b").get(60) == ("nic:a", "/bin/b"), "its own comes first"
    assert asker.ask.call_one("").get(60) == ("", "")


class Sizes(Actor):
    @endpoint
    def of(self, parts: list[bytes]) -> int:
        return sum(map(len, parts))


def test_calls_may_be_limited_in_size(mesh4: ProcMesh) -> None:
    sizes = mesh4.spawn("sizes", Sizes)
    parts = [bytes(1 << 18)] * 4
    with configured(codec_max_frame_length=1 << 20):
        with pytest.raises(SupervisionError, match=r"arguments of sizes\.of have 1\.05 MB, .* codec_max_frame_length"):
            sizes.of.call([bytes(part) + b"x" for part in parts])
        assert sizes.of.call(parts[:3]).get(60).values() == [3 << 18] * 4, "the actors live on"
    assert sizes.of.call([*parts, b"x"]).get(60).values() == [(1 << 20) + 1] * 4


def test_transports_read_back_as_what_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="of no meaning"), configured(default_transport="tcp") as settings:
        assert settings["default_transport"] == BindSpec(ChannelTransport.TcpWithHostname) != BindSpec("tcp://a:1")
    assert get_global_config()["default_transport"] == BindSpec("unix") == BindSpec(BindSpec("ipc"))
    monkeypatch.setattr(identifiers, "_enabled", None)
    monkeypatch.setattr(identifiers, "has_sessions", lambda: False)
    enable_transport("tcp://127.0.0.1:4444")
    assert str(get_global_config()["default_transport"]) == "tcp://127.0.0.1:4444"
