"""What users may import, from where they may: these names stay when modules move."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PUBLIC = {
    "meshbook": """
        Attachment DeviceMeshError Extent Future HostMesh Launcher LocalLauncher Mesh MeshError NDSlice Point ProcMesh
        SavedSession Shape Slice ValueMesh __version__ attach detach distribute errors heal_mesh module_to_mesh recall
        remember sessions shutdown start_hosts this_host this_proc
    """,
    "meshbook.actor": """
        Accumulator Actor ActorError ActorLostError ActorMesh ActorNotMadeError ActorStoppedError ActorStuckError
        ArgumentsError BufferDroppedError BufferKindError BufferSizeError Channel Context Endpoint MeshFailure
        NoEndpointError Port PortReceiver ProcsStoppedError ReloadError SupervisionError
        UnhandledFault as_endpoint concurrent_endpoint context current_actor_name current_rank current_size endpoint
        send unhandled_fault_hook
    """,
    "meshbook.monarch": """
        Accumulator Actor ActorError ActorMesh BootstrapCommand Channel Context Endpoint Extent Future HostMesh
        MeshFailure NDSlice Point Port PortReceiver ProcMesh RDMABuffer Shape
        Slice SupervisionError ValueMesh as_endpoint concurrent_endpoint context current_actor_name current_rank
        current_size default_bootstrap_cmd endpoint get_or_spawn_controller send shutdown_context this_host this_proc
        unhandled_fault_hook
    """,
    "meshbook.monarch.config": """
        clear_runtime_config configure configured get_global_config get_runtime_config
    """,
    "meshbook.distributed": "Mesh TensorError TensorLost TensorTorn ViewLost fetch_shard inspect remote show_plan",
    "meshbook.monarch.exceptions": "DeviceMeshError HostLost TensorError TensorLost TensorTorn ViewLost WorkerLost",
    "meshbook.monarch.job": """
        DEFAULT_JOB_PATH ImageSpec JobState JobTrait KubernetesJob LocalJob ProcessJob RayJob SSHJob
        SlurmJob hosts_from_config job_load job_loads load_current_job set_current_job
    """,
    "meshbook.errors": """
        AttachError CallError CallFailed CallInterrupted CallTimeout CrashLoopError DebugError DeviceError
        DeviceMeshError Failure GroupAborted HostLost LayoutError LeftStopped LoadError LocalProtocolError MailboxClosed
        MeshDetachedError MeshError MeshStoppedError MessageTooLarge PeerProtocolError ProtocolError RankError
        RanksDisagree RanksLeft RemoteTraceback SerializationError SessionInUse ShapeError SpawnError
        UnknownAxisError UsageError WorkerLost format_ranks group_failures
    """,
    "meshbook.monarch.rdma": """
        RDMAAction RDMABuffer RDMAReadTransferWarning RDMATcpFallbackWarning RDMAWriteTransferWarning get_rdma_backend
        is_ibverbs_available is_rdma_available
    """,
    "meshbook.monarch.spmd": "SPMDActor setup_torch_elastic_env setup_torch_elastic_env_async",
    "meshbook.shape": "Choice Extent Index Members Picked Piece Point Region arrange",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_where_they_were(module: str) -> None:
    found, names = importlib.import_module(module), set(PUBLIC[module].split())
    assert names <= set(getattr(found, "__all__", dir(found)))
    assert [name for name in sorted(names) if getattr(found, name, None) is None] == []


@pytest.mark.parametrize(
    "name", ["Future", "HostMesh", "RDMABuffer", "get_or_spawn_controller", "this_host", "this_proc"]
)
def test_names_that_moved_warn_and_lead_to_their_new_place(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"import {name} from meshbook(\.monarch)?:"):
        found = getattr(importlib.import_module("meshbook.actor"), name)
    assert found is getattr(importlib.import_module("meshbook.monarch"), name)


@pytest.mark.some()
@pytest.mark.quick("meshbook.errors")
@pytest.mark.parametrize("module", PUBLIC)
def test_whatever_is_imported_first_is_whole(module: str) -> None:
    """Faces that fetch names from above are where circles would show."""
    code = f"import {module} as face; [getattr(face, name) for name in getattr(face, '__all__', ())]"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_packages_are_there_without_an_import_of_their_own() -> None:
    code = "import meshbook; meshbook.actor.Actor, meshbook.shape.Extent, meshbook.wire.messages"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_one_import_serves_programs_with_tensors_and_loads_torch_for_these_alone() -> None:
    code = """
import sys
import meshbook as monarch
assert issubclass(monarch.errors.WorkerLost, monarch.DeviceMeshError)
assert callable(monarch.heal_mesh) and "torch" not in sys.modules
assert monarch.Mesh is monarch.distributed.Mesh and "torch" in sys.modules
assert monarch.DeviceMeshError is monarch.monarch.exceptions.DeviceMeshError
assert callable(monarch.distribute) and callable(monarch.module_to_mesh)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["meshbook.agent.host_agent", "meshbook.worker.template", "meshbook.worker.process"])
def test_agents_and_workers_do_not_load_what_drives_meshes(module: str) -> None:
    """Each of them would take a fifth of a second longer to start."""
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith('meshbook.controller')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
