"""Monarch's job of Kubernetes: hosts in pods, each name with an image and amounts of its own.

job = KubernetesJob("ml")
job.add_mesh("trainers", 2, image_spec=ImageSpec("registry/meshbook:1", {"nvidia.com/gpu": 8}))
procs = job.state().trainers.spawn_procs({"gpus": 8})
job.kill()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshbook.errors import UsageError
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.job_trait import JobTrait
from meshbook.mesh.jobs import HostsJob, checked_counts, start_all


@dataclass(frozen=True)
class ImageSpec:
    """An image, and what each of its pods is given: ``{"cpu": 8, "memory": "64Gi", "nvidia.com/gpu": 8}``."""

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

        template: a file with the template of a pod, which may say what image it is.
        """
        self._check_changeable(name)
        checked_counts({name: num_replicas})
        spec = ImageSpec(image_spec) if isinstance(image_spec, str) else image_spec
        options = [] if spec is None else [f"--image={spec.image}"]
        options += [f"--resource={key}={value}" for key, value in spec.resources.items()] if spec else []
        options += [f"--template={template}"] if template else []
        self._meshes[name] = num_replicas, tuple(options)

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, KubernetesJob) and self.active and spec._spec == self._spec

    @property
    def _spec(self) -> object:
        return self._meshes, self._options, self._python

    def _start(self) -> dict[str, HostMesh]:
        from meshbook.launchers.k8s import KubernetesLauncher  # only here: who has no such hosts need not load it

        if not self._meshes:
            raise UsageError('the job has no hosts: add_mesh("trainers", 2, image_spec=ImageSpec(...)).')
        return start_all(
            {
                name: (count, KubernetesLauncher(python=self._python, options=(*self._options, *options)))
                for name, (count, options) in self._meshes.items()
            }
        )
