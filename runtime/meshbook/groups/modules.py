"""DDP and FSDP modules after their groups were formed again: an iteration that was cut off must not spoil the next.

Both keep track of where an iteration is. A DDP module gets a new reducer on all ranks, since one that had got further
than the others would have other buckets. FSDP2 forgets the iteration by torch's own means and shards its parameters
again. Parameters and optimizer states are not touched; gradients of the lost iteration are for `zero_grad`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import _register_comm_hook

from meshbook.concurrency.patches import patch

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.nn.parallel import DistributedDataParallel

_ddp_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def watch_modules() -> None:
    """Remember DDP modules from now on. Idempotent."""
    from torch.nn.parallel import DistributedDataParallel

    torch_init: Callable[..., None] = DistributedDataParallel.__init__
    if hasattr(torch_init, "__wrapped__"):
        return

    @functools.wraps(torch_init)
    def remembering_init(self: DistributedDataParallel, *args: object, **kwargs: object) -> None:
        torch_init(self, *args, **kwargs)
        _ddp_modules.add(self)

    patch(DistributedDataParallel, "__init__", remembering_init)


def repair_modules(groups: Collection[object] | None = None) -> None:
    """Make DDP and FSDP2 modules ready for another iteration; names on stderr those that must be made again.

    groups: only modules that use one of these.
    """
    broken = []
    for ddp in list(_ddp_modules):
        if groups is not None and ddp.process_group not in groups:
            continue
        try:
            _renew_reducer(ddp)
        except Exception as error:
            broken.append(f"DistributedDataParallel({type(ddp.module).__name__}): {error}")
    for state in _fsdp_roots():
        if groups is not None and _groups_of(state).isdisjoint(groups):
            continue
        try:
            _forget_iteration(state)
        except Exception as error:
            names = ", ".join(type(module).__name__ for module in getattr(state, "_modules", ()))
            broken.append(f"fully_shard({names}): {error}")
    for text in broken:
        print(f"the process groups were formed again; make this module again on all ranks: {text}", file=sys.stderr)


def _renew_reducer(ddp: Any) -> None:
    """As unpickling a DDP module does; no collective."""
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._has_rebuilt_buckets = False
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in getattr(ddp, "_comm_hooks", ()):
        _register_comm_hook(ddp.reducer, state, hook)


def _fsdp_roots() -> Iterator[FSDPState]:
    """The states of FSDP2's root modules that have run."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    composable = sys.modules.get("torch.distributed._composable_state")
    if fsdp is None or composable is None:
        return
    seen = set()
    for reference in list(composable._module_state_mapping.values()):
        state = reference() if isinstance(reference, weakref.ref) else reference
        if isinstance(state, fsdp.FSDPState) and state._is_root and id(state) not in seen:
            seen.add(id(state))
            yield state


def _groups_of(root: FSDPState) -> set[object]:
    """The process groups over which a root module of FSDP2, and those below it, are sharded and replicated."""
    infos = [group.mesh_info for state in root._state_ctx.all_states for group in _parameter_groups(state)]
    names = ("shard_process_group", "replicate_process_group")
    return {getattr(info, name) for info in infos for name in names if hasattr(info, name)}


def _forget_iteration(root: FSDPState) -> None:
    for state in root._state_ctx.all_states:
        for group in _parameter_groups(state):
            group._all_gather_result = None  # an operation of the former groups, which nobody can wait for
    if not hasattr(root, "_reset_iter_state"):
        raise RuntimeError(f"torch {torch.__version__} cannot forget an iteration that was cut off")
    root._reset_iter_state()


def _parameter_groups(state: FSDPState) -> list[FSDPParamGroup]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
