"""The files of a save: who writes which part of them, and the copy that each rank makes of its part.

Entries have a key each: a tensor, or a pickled value. Ranks tell each other a hash of each entry (`hashes`): one that
is equal on all ranks is written by one of them, and an entry that differs once for each of its values, as
``KEY@FIRST_RANK``. Parts of a DTensor are not compared: the ranks of its mesh hold one value together.
"""

from __future__ import annotations

import functools
import hashlib
import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from meshbook.checkpoint.folder import DCP, SAFETENSORS
from meshbook.formatting import group_ranks

SavedEntry: TypeAlias = "torch.Tensor | bytes"
Copies: TypeAlias = dict[str, list[list[int]]]

HASHED_BYTES = 1 << 16
"""Tensors up to this size are hashed whole, larger ones by a weighted sum over each block of their memory."""
BLOCKS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""The size of a block in words of 4 bytes, by device: the cache of a core, and the work of a kernel."""


def find_copies(told: Sequence[Mapping[str, str]]) -> Copies:
    """Return the keys whose entries are not the same on all ranks, with the ranks of each copy."""
    keys = dict.fromkeys(key for each in told for key in each)
    copies = {}
    for key in keys:
        groups = list(group_ranks((rank, each[key]) for rank, each in enumerate(told) if key in each).values())
        if len(groups) > 1 or len(groups[0]) < len(told):
            copies[key] = groups
    return copies


def key_of_copy(key: str, copies: Copies, rank: int) -> str | None:
    """Return the key under which a rank's copy of an entry is written; None where the rank had none."""
    if key not in copies:
        return key
    for ranks in copies[key]:
        if rank in ranks:
            return key if len(copies[key]) == 1 else f"{key}@{ranks[0]}"
    return None


def bare_key(key: str, copies: Copies) -> str:
    """Return the key of the entry whose copy, or whose only one, has a key."""
    bare, _, _ = key.rpartition("@")
    return bare if bare in copies else key


class SaveFiles:
    """The files of one save, as a rank writes them. The methods are called in this order."""

    def __init__(self, path: Path, entries: Mapping[str, SavedEntry], format: str) -> None:
        """entries: what this rank has, by key."""
        self._path, self._entries, self._format = path, entries, format
        if format == DCP:
            self._writer: Any = FileSystemWriter(path)
        else:
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

            self._writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
        self._planner = _StagedPlanner()
        self._plan = SavePlan([])
        self._metadata: Metadata | None = None

    def hashes(self) -> dict[str, str]:
        """Return a hash of each entry of this rank, by its key."""
        is_alone = dist.get_world_size() == 1
        return {key: "" if is_alone else hash_entry(entry) for key, entry in self._entries.items()}

    def plan(self, told: Sequence[Mapping[str, str]]) -> Copies:
        """Decide with the other ranks who writes what. told: the hashes of each rank. Returns: `Manifest.copies`."""
        copies, rank = find_copies(told), dist.get_rank()
        mine = {key_of_copy(key, copies, rank) or key: entry for key, entry in self._entries.items()}
        self._planner.set_up_planner(mine, is_coordinator=rank == 0)
        self._writer.set_up_storage_writer(rank == 0)
        local = self._writer.prepare_local_plan(self._planner.create_local_plan())
        plans: list[Any] = [None] * len(told)
        dist.gather_object(local, plans if rank == 0 else None)
        if rank == 0:
            plans, self._metadata = self._planner.create_global_plan(plans)
            plans = self._writer.prepare_global_plan(plans)
        box: list[Any] = [None]
        dist.scatter_object_list(box, plans if rank == 0 else None)
        self._plan = self._planner.finish_plan(box[0])
        return copies

    def stage(self, *, copies: bool) -> int:
        """Copy what this rank is to write, unless its values stay until it is written; return the bytes."""
        self._entries = {}
        return self._planner.stage(self._plan.items, copies)

    def write(self) -> Any:
        """Write it; return what rank 0 is to know of it. On any thread."""
        return self._writer.write_data(self._plan, self._planner).value()

    def finish(self, written: Sequence[Any]) -> None:
        """Write, on rank 0, what says where everything is. written: what each rank has returned."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, list(written))
        if self._format == SAFETENSORS:
            shutil.rmtree(self._path / "sharded")  # of which whole files are made


class _StagedPlanner(DefaultSavePlanner):
    """A planner that writes copies on the CPU; values are pickled already."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged: dict[str, Any] = {}

    def stage(self, items: Sequence[WriteItem], copies: bool) -> int:
        """Take what the items are to write, as copies or as it is; return the bytes."""
        for item in items:
            entry = super().lookup_object(item.index)
            self._staged[item.index.fqn] = copy_to_host(entry) if copies and isinstance(entry, torch.Tensor) else entry
        if any(getattr(each, "is_cuda", False) for each in self.state_dict.values()):
            torch.cuda.synchronize()
        self.state_dict = {}  # what ranks do with the originals is no concern of ours
        return sum(each.nbytes for each in self._staged.values() if isinstance(each, torch.Tensor))

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._staged[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return io.BytesIO(object) if write_item.type is WriteItemType.BYTE_IO else object


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy in memory of the machine. On a GPU it is there after the device's synchronization."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach(), non_blocking=True)


def hash_entry(entry: SavedEntry) -> str:
    """Return a hash of a value; for a DTensor the ranks that hold it together."""
    if isinstance(entry, DTensor):
        return f"on {entry.device_mesh.mesh.flatten().tolist()}"
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(entry, bytes):
        digest.update(entry)
        return digest.hexdigest()
    digest.update(f"{entry.dtype} {tuple(entry.shape)}".encode())
    octets = entry.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if octets.numel() > HASHED_BYTES:
        if octets.data_ptr() % 8:
            octets = octets.clone()
        whole = octets.numel() // 8 * 8
        octets = torch.cat([_sum_blocks(octets[:whole].view(torch.int32)).view(torch.uint8), octets[whole:]])
    digest.update(octets.cpu().numpy().tobytes())
    return digest.hexdigest()


def _sum_blocks(words: torch.Tensor) -> torch.Tensor:
    """Return a sum for each block of words. A word has a weight by its place, so an exchange of two shows as well."""
    weights = _weights(words.device)
    mixed, size = torch.empty_like(weights), len(weights)
    sums = []
    for begin in range(0, len(words), size):
        block = words[begin : begin + size]
        part = mixed[: len(block)]
        torch.bitwise_right_shift(block, 15, out=part)  # or weights would move the high bits out of a word
        part.bitwise_xor_(block).mul_(weights[: len(block)])
        sums.append(part.view(torch.int64).sum())
    return torch.stack(sums)


@functools.lru_cache(maxsize=1)
def _weights(device: torch.device) -> torch.Tensor:
    """Return the weights of a block's words, which are equal on all ranks, and odd, so that no bit is lost."""
    size = BLOCKS.get(device.type, BLOCKS["cuda"])
    draw = torch.Generator().manual_seed(size)
    weights = torch.randint(-(1 << 31), 1 << 31, (size,), generator=draw, dtype=torch.int64, device="cpu")
    return (weights.to(torch.int32) | 1).to(device)
