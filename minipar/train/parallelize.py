"""The transformations that make a rank's part of a model, in the order in which they are applied.

Does what `simple/train.py` does, for any model and mesh:

    1. pipeline   cut the layers into stages; everything after this touches only this rank's stages
    2. experts    give each ep rank its own experts; before tp, which then cuts each of these experts
    3. tensor     cut every matrix; autograd accumulates gradients that are already summed over tp
    4. context    replace the attention core by one that also attends to other ranks' keys; nothing else mixes tokens
    5. recompute  activation checkpointing; after all communication is in the blocks, since recomputation repeats it
    6. data       last: shard the remaining parameters, and sum gradients over dp x cp

The model is on the meta device until its parameters are this rank's parts. Only then does each parameter get its value,
made from (seed, name) or read from --init. So no rank ever holds more than its part and one unit, and no initial weight is
sent. `config.choice` returns each option that is selected by name: schedule, dispatch, tp layout, products, averaging,
optimizer, memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig, schedule_of
from minipar.context import context_parallel
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.data_parallel.arguments import CommOf, require_per_element
from minipar.data_parallel.loss_scaler import DynamicLossScaler
from minipar.data_parallel.memory import RestingPlace
from minipar.data_parallel.optimizer_interface import OptimizerInterface, TorchOptimizerAdapter
from minipar.expert import expert_parallel, gradient_comm
from minipar.mesh import Mesh, place_whole, placement_of
from minipar.model import Block, Transformer
from minipar.pipeline import Pipeline, balance
from minipar.pipeline.measure import seconds_of
from minipar.pipeline.partition import layer_costs
from minipar.schedules import Schedule
from minipar.train.averaging import Averager
from minipar.train.checkpoint.initial_weights import fill, fill_buffers, initial_values
from minipar.train.master_weights import MasterWeights
from minipar.train.optim import BETAS, Group, OptimizerFamily, make_scaler, norm_shares
from minipar.train.recompute import recompute, relocate_activations


@dataclass
class RankState:
    """This rank's part of the model, ready to be trained.

    stages    the transformed modules that this rank holds
    pipeline  runs the stages, wrapped in DDP or FSDP (under ZeRO-1 and -2 they are not wrapped)
    optimizer the optimizer, over this rank's part of the parameters
    scaler    the loss scale of a float16 model: part of a run's state
    shares    for each of `optimizer.tensors`, the fraction of its square that this rank counts in the gradient norm
    averaging how this rank averages gradients, and the state of that
    """

    mesh: Mesh
    stages: list[Transformer]
    pipeline: Pipeline
    optimizer: OptimizerInterface
    averaging: Averager
    shares: list[float] = field(default_factory=list)
    scaler: DynamicLossScaler | None = None

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.current_scale


def parallelize(config: TrainConfig, mesh: Mesh, device: torch.device) -> RankState:
    """Build this rank's part of the model of `config`, transformed for the rank's coordinates in the mesh.

    The strategies' collectives use `config.algorithm` where they support it.
    """
    schedule = schedule_of(config, mesh.coordinates.dp)
    mesh = _mesh_for(config, mesh)
    assert mesh.world is not None
    stages = [transformed_stage(config, mesh, device, stage) for stage in own_stages(config, mesh, schedule)]
    averaging: Averager = config.choice("compress").load()(config)
    modules, optimizer = data_parallel(config, mesh, stages, averaging, ends_apart=schedule.num_stages > 1)
    pipeline_class: type[Pipeline] = config.choice("schedule").load()
    stagewise = config.gather_every == "stage"
    pipeline = pipeline_class(modules, mesh.comm("pp"), schedule, reshard_stages=stagewise)
    state = RankState(mesh, stages, pipeline, optimizer, averaging, scaler=make_scaler(config, mesh.world))
    state.shares = norm_shares(optimizer.tensors, mesh.world)
    return state


def _mesh_for(config: TrainConfig, mesh: Mesh) -> Mesh:
    """Return the mesh with the run's collective algorithm."""
    if config.algorithm == "auto":
        return mesh
    assert mesh.world is not None
    return Mesh(mesh.world.using(config.algorithm), **config.mesh_sizes)


# 1. pipeline --------------------------------------------------------------------------------------------------------


def own_stages(config: TrainConfig, mesh: Mesh, schedule: Schedule) -> Iterator[Transformer]:
    """Yield this rank's stages of the model, on the meta device."""
    assert mesh.world is not None
    layers = stage_layers(config, mesh.world, schedule.num_stages)
    for number in schedule.stages_of(mesh.coordinates.pp):
        ends = number == 0, number == schedule.num_stages - 1
        yield Transformer(config.model, config.seed, layers[number], *ends, "meta", config.torch_dtype)


def stage_layers(config: TrainConfig, world: Comm, num_stages: int) -> list[range]:
    """Return the layers of each stage, divided so that the slowest stage is as fast as possible.

    With layer_costs="measured", rank 0 times every layer and sends its seconds to all ranks: 8 bytes a layer.
    """
    model = Transformer(config.model, device="meta")
    if config.layer_costs == "computed" or num_stages == 1:
        return balance(layer_costs(model), num_stages)
    costs = torch.zeros(config.model.num_layers, dtype=torch.float64, device=world.device)
    if world.rank == 0:
        costs += torch.tensor(measured_costs(config, world.device), dtype=costs.dtype)
    return balance(world.broadcast(costs).tolist(), num_stages)


def measured_costs(config: TrainConfig, device: torch.device) -> list[float]:
    """Return the seconds of each layer on this rank for one microbatch of whole samples, before tp and cp cut it."""
    values, last = initial_values(config), config.model.num_layers - 1

    def layers() -> Iterator[Transformer]:
        for i in range(last + 1):
            layer = Transformer(config.model, config.seed, [i], i == 0, i == last, "meta", config.torch_dtype)
            fill_buffers(layer, device)
            place_whole(layer)
            fill(layer, values, device)
            recompute(layer, config.recompute)
            yield layer

    samples = config.dp_samples[0] // config.dp_microbatches[0]
    return seconds_of(layers(), torch.zeros(samples, config.seq_len, dtype=torch.int64, device=device))


# 2. experts to 5. recompute -----------------------------------------------------------------------------------------


def transformed_stage(
    config: TrainConfig, mesh: Mesh, device: torch.device, stage: Transformer
) -> Transformer:
    """Transform a stage for this rank in place and return it, with values unless ZeRO-3 makes them shard by shard."""
    fill_buffers(stage, device)
    place_whole(stage)
    if config.ep > 1:
        options = vars(config.options["dispatch"])
        expert_parallel(stage, mesh.comm("ep"), dispatch=config.dispatch, **options)
    if config.tp > 1:
        config.choice("tp_layout").load()(stage, mesh.comm("tp"), config)
    if config.cp > 1:
        layout = config.cp_layout, config.cp_attention
        context_parallel(stage, mesh.comm("cp"), *layout, ulysses_size=config.cp_ulysses)
    config.choice("products").load()(stage, config, mesh)
    if config.zero < 3:
        fill(stage, initial_values(config), device)
    kept_of = [
        mesh.comm(axis) for axis in ("tp", "cp", "ep") if config.keep_messages and getattr(config, axis) > 1
    ]
    recompute(stage, config.recompute, kept_of)
    partition = mesh.comm("tp") if config.partition_activations else None
    relocate_activations(stage, partition, config.offload_activations)
    if config.compile != "none":
        for block in stage.layers.values():
            block.compile(backend=config.compile)
    return stage


# 6. data ------------------------------------------------------------------------------------------------------------
#
# zero   the pipeline's modules   gradients         optimizer state    parameters
# 0      DDP(stage)               full              full               full
# 1      stage                    full              shards             full
# 2      stage                    shards            shards             full
# 3      FSDP(stage)              shards            shards             shards


def data_parallel(
    config: TrainConfig, mesh: Mesh, stages: list[Transformer], averaging: Averager, ends_apart: bool
) -> tuple[list[nn.Module], OptimizerInterface]:
    """Return the pipeline's modules and the optimizer. `config.zero` decides what a rank keeps: see the table above.

    ends_apart  whether embedding and head are on different stages, so that tied gradients are summed over pp
    """
    tied = config.model.tie_embeddings and ends_apart
    if config.zero in (1, 2):
        return list(stages), zero_optimizer(config, mesh, stages, averaging, tied)
    modules = (sharded if config.zero == 3 else replicated)(config, mesh, stages, averaging, tied)
    return modules, optimizer_over(config, mesh, modules, averaging)


def replicated(
    config: TrainConfig, mesh: Mesh, stages: list[Transformer], averaging: Averager, tied: bool
) -> list[nn.Module]:
    """Wrap for ZeRO 0: every rank has all of its stages' parameters, gradients and states."""
    dtype = config.torch_reduce_dtype
    return [
        DDP(
            stage,
            gradient_comm(mesh),
            bucket_mb=config.bucket_mb,
            reduce="sum",
            reduce_dtype=None if dtype == config.torch_dtype else dtype,
            reduce_bucket=averaging.reduce_bucket,
        )
        for stage in stages
    ]


def zero_optimizer(
    config: TrainConfig, mesh: Mesh, stages: list[Transformer], averaging: Averager, tied: bool
) -> ZeroOptimizer:
    """Return the optimizer of ZeRO 1 and 2: states, then gradients too, are sharded over dp x cp."""
    family: OptimizerFamily = config.choice("optimizer").load()
    groups = family.groups(_named(stages), config.weight_decay)
    groups, of_ends = _ends_apart(groups) if tied else (groups, [])
    optimizer = family.zero_class(
        groups,
        family.optimizer_class(mesh),
        gradient_comm(mesh),
        config.zero,
        reduce="sum",
        **family.bucket_sizes(config),
        master_dtype=config.torch_master_dtype,
        reduce_dtype=config.torch_reduce_dtype,
        reduce_bucket=averaging.reduce_bucket,
        **_resting_place(config),
        lr=config.lr,
        betas=BETAS,
    )
    for group in of_ends:
        optimizer.add_param_group(group)
    return optimizer


def sharded(
    config: TrainConfig, mesh: Mesh, stages: list[Transformer], averaging: Averager, tied: bool
) -> list[nn.Module]:
    """Wrap for ZeRO 3: parameters are sharded, too. Tied weights stay unsharded: their gradients are summed over pp."""
    shards, replicas = sharding_comms(gradient_comm(mesh), config.replicate)
    # FSDP's shards are master weights. Parameters that FSDP does not shard are used in products as they are, so they keep
    # half precision. Buffers keep their dtype, as in one process.
    blocks = chain.from_iterable(stage.layers.values() for stage in stages)
    for module in blocks if tied else stages:
        for param in module.parameters():
            param.data = param.data.to(config.torch_master_dtype)
    return [
        FSDP(
            stage,
            shards,
            units=Block,
            shard_rest=not tied,
            reshard_after_forward=config.gather_every == "microbatch",
            reduce="sum",
            replicas=replicas,
            compute_dtype=config.torch_dtype if config.mixed_precision else None,
            reduce_dtype=config.torch_reduce_dtype,
            init_part=initial_values(config),
            reduce_bucket=averaging.reduce_bucket,
            **_resting_place(config),
        )
        for stage in stages
    ]


def optimizer_over(
    config: TrainConfig, mesh: Mesh, modules: list[nn.Module], averaging: Averager
) -> OptimizerInterface:
    """Return the optimizer over DDP's parameters or FSDP's shards; --offload or --compress may replace it by their own."""
    family: OptimizerFamily = config.choice("optimizer").load()
    groups = family.groups(_named(modules), config.weight_decay)
    cls = family.optimizer_class(mesh)
    options: dict[str, Any] = {"lr": config.lr, "betas": BETAS}
    if config.zero == 3:
        require_per_element(cls, per_element=False)
    memory: RestingPlace = config.choice("offload").load()
    if (offloaded := memory.optimizer(config, modules, groups, cls, **options)) is not None:
        return offloaded
    if (own := averaging.make_optimizer(groups, cls, gradient_comm(mesh), **options)) is not None:
        return own
    if config.mixed_precision:
        return MasterWeights(groups, cls, **options)
    return TorchOptimizerAdapter(cls(groups, **options))


def _ends_apart(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Take the embedding and its tied copy out of the groups; return the groups, and one new group for each of the two.

    ZeRO then gives each its own bucket, and cuts both at the same offsets: their gradients are added in the same order, and
    they stay equal bit for bit.
    """
    places = {p: placement_of(p) for group in groups for p in group["params"]}
    ends = {p for p, place in places.items() if "embedding.weight" in (place.name, place.tied_to)}
    others = [{**group, "params": [p for p in group["params"] if p not in ends]} for group in groups]
    return others, [{**group, "params": [p]} for group in groups for p in group["params"] if p in ends]


def _resting_place(config: TrainConfig) -> dict[str, Any]:
    folder = getattr(config.options.get("offload"), "folder", None)
    return {"offload": config.offload, "folder": None if folder is None else str(folder)}


def sharding_comms(comm_of: CommOf, replicate: int) -> tuple[CommOf, CommOf | None]:
    """Split the ranks that hold the same parameters: return the Comms to shard over, and the Comms with the same shard.

    Both are functions from a parameter to a Comm. With ranks 0 to 3 and replicate=2, ranks 0 and 1 hold one set of shards,
    ranks 2 and 3 another; gradients are reduced inside these groups, then summed over 0 and 2, and over 1 and 3.
    """
    if replicate == 1:
        return comm_of, None

    @cache
    def cut(comm: Comm) -> tuple[Comm, Comm]:
        size = comm.size // replicate
        first = comm.rank // size * size
        same_shard = range(comm.rank % size, comm.size, size)
        return comm.subgroup(range(first, first + size), "shards"), comm.subgroup(same_shard, "replicas")

    return lambda param: cut(comm_of(param))[0], lambda param: cut(comm_of(param))[1]


def _named(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [named for module in modules for named in module.named_parameters()]
