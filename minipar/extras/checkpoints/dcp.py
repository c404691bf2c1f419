"""torch's distributed checkpoint format (DCP), for tensors with a Placement: one mesh writes, any other mesh can read.

DCP stores a tensor as boxes, each with its offsets and sizes, and a Placement is a few boxes of the global tensor. So a
rank writes its own boxes, and reads only the stored boxes that overlap its part. torch does the same for DTensors.

    stored     [0:2, :] [2:4, :]      written by FSDP over 2 ranks
    wanted     [:, 0:3]               by a tensor-parallel rank: the columns 0:3 of both boxes

Files, metadata and the order of reading are torch's own: `FileSystemWriter` and `FileSystemReader`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from minipar.comm import Comm
from minipar.comm.objects import all_gather_objects
from minipar.data_parallel.chunk_optimizer import MASTER
from minipar.data_parallel.optimizer_interface import OptimizerInterface, as_optimizer_interface
from minipar.mesh import Placement, placement_of
from minipar.mesh.regions import Box, Piece
from minipar.support.errors import one_of

T = TypeVar("T")
# Key in the checkpoint -> the part that this rank holds, and its values.
Parts = Mapping[str, tuple[Placement, Tensor]]
METADATA = ".metadata"  # torch's name of the file that is written last, and makes a folder a checkpoint


def parameter_parts(module: nn.Module) -> dict[str, tuple[Placement, Tensor]]:
    """Return this rank's part of every parameter, under its name in the one-process model."""
    placed = [(placement_of(parameter), parameter.detach()) for parameter in module.parameters()]
    return {placement.name: (placement, values) for placement, values in placed if placement.tied_to is None}


def optimizer_parts(
    optimizer: OptimizerInterface | torch.optim.Optimizer,
) -> dict[str, tuple[Placement, Tensor]]:
    """Return this rank's part of the optimizer state, with keys like "layers.0.attention.q.weight.exp_avg".

    The optimizer is a ZeroOptimizer, or torch's over the parameters of FSDP, DDP or a split model.
    Counts of steps are parts without dimensions. Master weights of another dtype than the parameters are parts, too.
    Raises RuntimeError if there is no state: optimizers make it in their first step. ValueError if a value is no tensor.
    """
    optimizer = as_optimizer_interface(optimizer)
    found = {}
    dtypes = {placement_of(x).name: x.dtype for x in optimizer.tensors}
    has_state = False
    for tensor, state in optimizer.tensors_and_states():
        placement = placement_of(tensor)
        has_state |= bool(state)
        if tensor.dtype != dtypes[placement.name]:
            found[f"{placement.name}.{MASTER}"] = (placement, tensor.detach())
        for key, value in state.items():
            name = f"{placement.name}.{key}"
            if isinstance(value, Tensor) and value.shape == tensor.shape:
                found[name] = (placement, value)
            elif isinstance(value, Tensor) and value.dim() == 0:
                found[name] = (Placement.whole(name, ()), value)
            elif value is not None:
                raise ValueError(
                    f"{name} is {value!r}; only tensors of the parameter's shape or of no dims are stored"
                )
    if not has_state:
        raise RuntimeError(
            "the optimizer has no state before its first step, so nothing would be saved or loaded; load with "
            "load_optimizer(folder, optimizer), which makes the state, and leave out an optimizer that never has one"
        )
    return found


def load_optimizer(folder: str | Path, optimizer: OptimizerInterface | torch.optim.Optimizer) -> None:
    """Make the states that a checkpoint has for the optimizer's tensors, and read them; a new optimizer has none.

    Load the parameters first, as `load` does. Options such as the learning rate are the caller's. Sends nothing.
    Raises ValueError if the checkpoint has no state for a tensor, and as `load`.
    """
    optimizer = as_optimizer_interface(optimizer)
    every = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    stored = {key: x for key, x in every.items() if isinstance(x, TensorStorageMetadata)}
    for tensor, state in optimizer.tensors_and_states():
        name = placement_of(tensor).name
        found = {key.removeprefix(f"{name}."): x for key, x in stored.items() if key.startswith(f"{name}.")}
        keys = {key: x for key, x in found.items() if "." not in key and key != MASTER}
        if not keys:
            raise ValueError(f"{folder} has no optimizer state of {name}; save optimizer_parts, too")
        state.clear()
        for key, x in keys.items():
            like = torch.zeros(()) if not tuple(x.size) else tensor
            state[key] = torch.zeros_like(like, dtype=x.properties.dtype, requires_grad=False)
    load(folder, optimizer_parts(optimizer))


def save(folder: str | Path, parts: Parts, comm: Comm | None = None) -> None:
    """Write a checkpoint in DCP's format. Each rank of `comm` writes its own parts; `comm=None` means a single process.

    A checkpoint that the folder has is no longer one as soon as this writes: save to another folder to keep it.
    Parts that several ranks hold are written by one of them, so each element is written once. Sends the plans and, at the
    end, the location of each box in the files, but no tensor values.
    """
    writer, planner = FileSystemWriter(str(folder)), _SavePlanner(False, False)
    planner.set_up_planner(dict(parts), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=comm is None or comm.rank == 0)
    own = planner.create_local_plan()
    if comm is None or comm.rank == 0:
        # The metadata of an older checkpoint would describe what an interrupted save leaves.
        (Path(folder) / METADATA).unlink(missing_ok=True)
    if comm is not None:
        comm.barrier()
    # Every rank computes the same global plan from the local plans of all. In torch, a coordinator would send it.
    plans, metadata = planner.create_global_plan(_of_all(comm, writer.prepare_local_plan(own)))
    plan = writer.prepare_global_plan(plans)[0 if comm is None else comm.rank]
    stored = _of_all(comm, writer.write_data(planner.finish_plan(plan), planner).wait())
    if comm is None or comm.rank == 0:
        writer.finish(metadata, stored)
    if comm is not None:
        comm.barrier()


def _of_all(comm: Comm | None, value: T) -> list[T]:
    return [value] if comm is None else all_gather_objects(comm, value)


def load(folder: str | Path, parts: Parts) -> None:
    """Read `parts` from a checkpoint in DCP's format, whichever program wrote it. A rank may call this alone.

    Sends nothing. If a stored box overlaps the parts, the whole box is read.
    Raises ValueError if a key is missing, has another shape, or is not stored completely.
    """
    reader = FileSystemReader(str(folder))
    metadata, planner = reader.read_metadata(), _LoadPlanner(folder, parts)
    planner.set_up_planner({}, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()


class _SavePlanner(DefaultSavePlanner):
    """Writes each piece of each part as a shard of its global tensor. torch removes duplicates and checks for gaps."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [_write_item(key, p, piece, x) for key, (p, x) in self.state_dict.items() for piece in p.pieces()]
        )

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        placement, values = self.state_dict[write_item.index.fqn]
        (piece,) = [p for p in placement.pieces() if torch.Size(p.box.start) == write_item.index.offset]
        found: Tensor = piece.of_local(values)
        return found


def _write_item(key: str, placement: Placement, piece: Piece, values: Tensor) -> WriteItem:
    start = torch.Size(piece.box.start)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=start, sizes=torch.Size(piece.box.length)),
        properties=TensorProperties.create_from_tensor(values),
        size=torch.Size(placement.global_shape),
    )
    return WriteItem(index=MetadataIndex(key, start), type=WriteItemType.SHARD, tensor_data=data)


class _LoadPlanner(LoadPlanner):
    """Reads the overlap of each stored box with each piece of this rank's parts into a view of the local tensor."""

    def __init__(self, folder: str | Path, parts: Parts):
        self.folder, self.parts, self.views = folder, parts, dict[MetadataIndex, Tensor]()

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [item for key, (placement, x) in self.parts.items() for item in self._items(key, placement, x)]
        )

    def _items(self, key: str, placement: Placement, values: Tensor) -> Iterator[ReadItem]:
        stored = self.stored.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{self.folder} has no tensor {key!r}; it has {one_of(self.stored, near=key)}")
        if tuple(stored.size) != placement.global_shape:
            raise ValueError(
                f"{self.folder}: {key} has shape {tuple(stored.size)}, expected {placement.global_shape}"
            )
        missing = placement.numel
        for piece in placement.pieces():
            for chunk in stored.chunks:
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes)).intersection(piece.box)
                if box.numel:
                    missing -= box.numel
                    yield self._item(key, chunk, piece, box, values)
        if missing:
            raise ValueError(
                f"{self.folder}: {missing} elements of {key} are in no stored box; write it again"
            )

    def _item(
        self, key: str, chunk: ChunkStorageMetadata, piece: Piece, box: Box, values: Tensor
    ) -> ReadItem:
        place = MetadataIndex(key, torch.Size(box.start))
        self.views[place] = piece.of_local(values, box)
        from_chunk = torch.Size(s - o for s, o in zip(box.start, chunk.offsets))
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=place,
            dest_offsets=torch.Size([0] * len(box.start)),
            storage_index=MetadataIndex(key, chunk.offsets),
            storage_offsets=from_chunk,
            lengths=torch.Size(box.length),
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor, and was not asked for")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.views[read_item.dest_index]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the values were read into the local tensor."""
