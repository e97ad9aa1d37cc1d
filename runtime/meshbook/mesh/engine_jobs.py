"""Jobs whose hosts others give: by ssh, Slurm, Ray, Kubernetes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshbook.errors import UsageError
from meshbook.launchers.base import Launcher
from meshbook.mesh.jobs import HostsJob, checked_counts, checked_names


class SSHJob(HostsJob):
    """Hosts by ssh, which `add_mesh` names (`meshbook.launchers.ssh`)."""

    def __init__(self, python_exe: str | None = None, ssh_args: Sequence[str] = ()) -> None:
        """python_exe: the interpreter there; by default the path of our own where there is one, else ``python3``.

        ssh_args: options of ssh.
        """
        super().__init__()
        self._meshes: dict[str, tuple[str, ...]] = {}
        self._python, self._options = python_exe, tuple(ssh_args)

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """Have ``hosts``, as they are called for a login, under a name. Raises: UsageError once the job was applied."""
        self._check_changeable(name)
        checked_names([name])
        self._meshes[name] = (hosts,) if isinstance(hosts, str) else tuple(hosts)

    def _wanted(self) -> dict[str, tuple[int, Launcher]]:
        """Raises: UsageError where there are no hosts."""
        from meshbook.launchers.ssh import SSHLauncher  # only here: who has no such hosts need not load it

        if not self._meshes:
            raise UsageError('the job has no hosts: add_mesh("trainers", ["nodeA", "nodeB"]).')
        return {
            name: (len(hosts), SSHLauncher(hosts, python=self._python, options=self._options))
            for name, hosts in self._meshes.items()
        }


class SlurmJob(HostsJob):
    """Nodes of one allocation of Slurm, arranged by name (`meshbook.launchers.slurm`)."""

    _together = True

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str | None = None,
        slurm_args: Sequence[str] = (),
        monarch_port: int | None = None,
        job_name: str | None = None,
        ntasks_per_node: int = 1,
        *,
        time_limit: str | None = None,
        partition: str | None = None,
        log_dir: str | None = None,
        exclusive: bool = False,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: int | None = None,
        account: str | None = None,
        qos: str | None = None,
        out_of_cluster: bool = False,
        attach_to: str | None = None,
        bind_to: str | None = None,
    ) -> None:
        """meshes: how many nodes by name. slurm_args: options of salloc, beside the others.

        python_exe: the interpreter there; by default the path of our own where there is one, else ``python3``.
        job_start_timeout: how many seconds the allocation may take; it is asked for no longer.
        monarch_port, log_dir, out_of_cluster, attach_to, bind_to: Monarch's, which a warning says mean nothing here:
        ports are free ones, logs lie with the session, and nodes dial the program or, by ssh, it dials them.
        Raises: UsageError for more than one task per node: hosts start their processes.
        """
        super().__init__()
        if ntasks_per_node != 1:
            raise UsageError("ntasks_per_node is 1: a host starts its processes, spawn_procs({'gpus': 8}).")
        _warn_of_idle(
            monarch_port=monarch_port, log_dir=log_dir, out_of_cluster=out_of_cluster, attach_to=attach_to,
            bind_to=bind_to,
        )  # fmt: skip
        self._meshes, self._python = checked_counts(meshes), python_exe
        self._named = {
            "job-name": job_name, "time": time_limit, "partition": partition, "gpus-per-node": gpus_per_node,
            "cpus-per-task": cpus_per_task, "mem": mem, "account": account, "qos": qos, "immediate": job_start_timeout,
        }  # fmt: skip
        self._exclusive, self._more = exclusive, tuple(slurm_args)

    def add_mesh(self, name: str, num_nodes: int) -> None:
        """Have so many nodes under another name. Raises: UsageError once the job was applied."""
        self._check_changeable(name)
        self._meshes |= checked_counts({name: num_nodes})

    def share_node(self, tasks_per_node: int, gpus_per_task: int, partition: str) -> None:
        """Leave the rest of each node to other jobs, and ask for the needs of so many tasks; Slurm sets the memory.

        Raises: UsageError once the job was applied.
        """
        self._check_changeable("a share of nodes")
        self._exclusive = False
        self._named |= {"gpus-per-node": tasks_per_node * gpus_per_task, "partition": partition}

    @property
    def _options(self) -> tuple[str, ...]:
        options = [f"--{name}={value}" for name, value in self._named.items() if value is not None]
        return (*options, *(["--exclusive"] if self._exclusive else []), *self._more)

    def _wanted(self) -> dict[str, tuple[int, Launcher]]:
        from meshbook.launchers.slurm import SlurmLauncher  # only here: who has no such hosts need not load it

        launcher = SlurmLauncher(python=self._python, options=self._options)
        return {name: (count, launcher) for name, count in self._meshes.items()}


def _warn_of_idle(**arguments: object) -> None:
    if idle := [name for name, value in arguments.items() if value]:
        warnings.warn(f"{', '.join(idle)}: taken, as in Monarch, but of no meaning here", stacklevel=3)


class RayJob(HostsJob):
    """Nodes of one placement group of Ray, arranged by name (`meshbook.launchers.ray`)."""

    _together = True

    def __init__(
        self,
        meshes: Mapping[str, int],
        address: str = "",
        python_exe: str | None = None,
        ray_args: Sequence[str] = (),
        *,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """meshes: how many nodes by name. address: of the cluster; by default that of this machine.

        num_cpus, num_gpus, resources: the resources of each host. ray_args: more options, as of `RayLauncher`.
        python_exe: the interpreter there; by default the path of our own where there is one, else Ray's.
        """
        super().__init__()
        self._meshes, self._python, self._address = checked_counts(meshes), python_exe, address
        named = {"num-cpus": num_cpus, "num-gpus": num_gpus, "resources": resources and json.dumps(dict(resources))}
        self._options = (*(f"--{name}={value}" for name, value in named.items() if value is not None), *ray_args)

    def _wanted(self) -> dict[str, tuple[int, Launcher]]:
        from meshbook.launchers.ray import RayLauncher  # only here: who has no such hosts need not load it

        launcher = RayLauncher(self._address, python=self._python, options=self._options)
        return {name: (count, launcher) for name, count in self._meshes.items()}


@dataclass(frozen=True)
class ImageSpec:
    """An image, and the resources of each of its pods: ``{"cpu": 8, "memory": "64Gi", "nvidia.com/gpu": 8}``."""

    image: str
    resources: Mapping[str, str | int] = field(default_factory=dict)


class KubernetesJob(HostsJob):
    """Hosts in pods of one namespace, which `add_mesh` names (`meshbook.launchers.k8s`)."""

    def __init__(
        self,
        namespace: str = "",
        *,
        context: str | None = None,
        kubeconfig: str | None = None,
        python_exe: str | None = None,
        kubernetes_args: Sequence[str] = (),
    ) -> None:
        """namespace: by default that of the kubeconfig, or of the pod that this program runs in.

        python_exe: the interpreter in the image, by default ``python3`` there.
        kubernetes_args: more options for all pods, as of `KubernetesLauncher`.
        """
        super().__init__()
        named = {"namespace": namespace, "context": context, "kubeconfig": kubeconfig}
        options = [f"--{name}={value}" for name, value in named.items() if value]
        self._options, self._python = (*options, *kubernetes_args), python_exe
        self._meshes: dict[str, tuple[int, tuple[str, ...]]] = {}

    def add_mesh(
        self, name: str, num_replicas: int, *, image_spec: ImageSpec | str | None = None, template: str | None = None
    ) -> None:
        """Have so many hosts under a name. Raises: UsageError once the job was applied.

        template: a file with the template of a pod, which may name the image.
        """
        self._check_changeable(name)
        checked_counts({name: num_replicas})
        spec = ImageSpec(image_spec) if isinstance(image_spec, str) else image_spec
        options = [] if spec is None else [f"--image={spec.image}"]
        options += [f"--resource={key}={value}" for key, value in spec.resources.items()] if spec else []
        options += [f"--template={template}"] if template else []
        self._meshes[name] = num_replicas, tuple(options)

    def _wanted(self) -> dict[str, tuple[int, Launcher]]:
        from meshbook.launchers.k8s import KubernetesLauncher  # only here: who has no such hosts need not load it

        if not self._meshes:
            raise UsageError('the job has no hosts: add_mesh("trainers", 2, image_spec=ImageSpec(...)).')
        return {
            name: (count, KubernetesLauncher(python=self._python, options=(*self._options, *options)))
            for name, (count, options) in self._meshes.items()
        }
