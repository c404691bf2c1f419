"""The recipe: which strategies transform the model, and in which order.

`simple/train.py`, for any model and mesh:

    1. pipeline   cut the layers into stages: everything after this touches this rank's stages only
    2. experts    give each ep rank its own experts: before tp, which then cuts each of these
    3. tensor     cut every matrix; autograd accumulates gradients that are already summed over tp
    4. context    replace the attention core by one that sees other ranks' keys; nothing else mixes tokens
    5. recompute  activation checkpointing: wraps blocks whose communication is final, since they run again
    6. data       last, since it shards the parameters as they now are, and sums their gradients over dp x cp, and where
                  a pipeline runs in two directions over both copies of the model
    7. schedule   which rank runs which stage of which microbatch when

The model is on the meta device until its parameters are this rank's parts: only then does each get its value, made from
(seed, name) or read from --init. So no rank ever holds more than its part and one unit, and no initial weight is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from minipar.comm import Comm
from minipar.context import context_parallel
from minipar.data_parallel import DDP, WholeParameterZero, ZeroOptimizer
from minipar.data_parallel.compress import Compressors
from minipar.data_parallel.fsdp import FSDP
from minipar.data_parallel.loss_scaler import DynamicLossScaler
from minipar.data_parallel.offloaded_optimizer import OffloadedOptimizer
from minipar.data_parallel.optimizer_interface import OptimizerInterface, TorchOptimizerAdapter
from minipar.expert import expert_parallel, gradient_comm
from minipar.mesh import Mesh, place_whole, placement_of
from minipar.model import Block, Transformer
from minipar.pipeline import Pipeline, balance
from minipar.pipeline.partition import layer_costs
from minipar.tensor_parallel import grid_parallel, tensor_parallel
from minipar.train.compression import gradient_compressor, make_own_optimizer
from minipar.train.initial_weights import fill, fill_buffers, initial_values
from minipar.train.master_weights import MasterWeights
from minipar.train.optim import BETAS, norm_shares, optimizer_class, parameter_groups
from minipar.train.recompute import recompute, relocate_activations
from minipar.train.reference import make_scaler
from minipar.train.slicing import schedule_of, slice_sizes
from minipar.train.train_config import TrainConfig


@dataclass
class RankState:
    """This rank's part of the model, ready to be trained.

    stages    the transformed modules that this rank holds
    pipeline  runs the stages, wrapped in DDP or FSDP (under ZeRO-1 and -2, as they are)
    updates   the optimizer, over this rank's part of the parameters
    scaler    the loss scale of a float16 model: part of a run's state
    shares    the fraction of the square of each of `optimizer.tensors` that this rank counts in the gradient norm
    compressors   what compresses gradients, of DDP or ZeroOptimizer
    """

    mesh: Mesh
    stages: list[Transformer]
    pipeline: Pipeline
    optimizer: OptimizerInterface
    shares: list[float] = field(default_factory=list)
    scaler: DynamicLossScaler | None = None
    compressors: list[Compressors] = field(default_factory=list)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.current_scale


def parallelize(config: TrainConfig, mesh: Mesh, device: torch.device) -> RankState:
    """Build this rank's part of the model of `config`, transformed for the rank's coordinates in the mesh.

    The strategies' collectives use `config.algorithm`, wherever they have it.
    """
    schedule = schedule_of(config)
    mirrored = schedule.copies == 2
    if config.algorithm != "auto" or mirrored:
        mesh = Mesh(mesh.world.using(config.algorithm), **config.mesh_sizes, mirrored=mirrored)
    stages = [
        _stage(config, mesh, device, schedule.part(number), schedule.model_stages)
        for number in schedule.stages_of(mesh.coordinates.pp)
    ]
    modules, optimizer = _data_parallel(config, mesh, stages, schedule.model_stages)
    pipeline = Pipeline(modules, mesh.comm("pp"), schedule, slice_sizes=slice_sizes(config))
    state = RankState(mesh, stages, pipeline, optimizer, scaler=make_scaler(config, mesh.world))
    state.shares = norm_shares(optimizer.tensors, mesh.world)
    state.compressors = [x.compressors for x in (*modules, optimizer) if isinstance(x, DDP | ZeroOptimizer)]
    return state


def _stage(config: TrainConfig, mesh: Mesh, device, number: int, num_stages: int) -> Transformer:
    layers = stage_layers(config, num_stages)[number]
    first, last = number == 0, number == num_stages - 1
    stage = Transformer(config.model, config.seed, layers, first, last, "meta", config.torch_dtype)
    fill_buffers(stage, device)
    place_whole(stage)
    if mesh.sizes["ep"] > 1:
        expert_parallel(stage, mesh.comm("ep"), node_size=config.ep_node_size, chunks=config.ep_chunks,
                        once_per_node=config.ep_once_per_node, shadow=config.ep_shadow)  # fmt: skip
    if mesh.sizes["tp"] > 1:
        _cut_matrices(config, stage, mesh.comm("tp"))
    if mesh.sizes["cp"] > 1:
        context_parallel(stage, mesh.comm("cp"), config.cp_layout, config.cp_attention,
                         ulysses_size=config.cp_ulysses)  # fmt: skip
    if config.zero < 3:  # FSDP cuts the parameters once more
        fill(stage, initial_values(config), device)
    recompute(stage, config.recompute)
    relocate_activations(
        stage, mesh.comm("tp") if config.partition_activations else None, config.offload_activations
    )
    for block in stage.layers.values() if config.compile != "none" else ():
        block.compile(backend=config.compile)
    return stage


def _cut_matrices(config: TrainConfig, stage: Transformer, tp: Comm) -> None:
    if config.tp_layout == "1d":
        tensor_parallel(stage, tp, config.sequence_parallel, config.tp_chunked, config.pad_vocab)
    else:
        grid_parallel(stage, tp, config.tp_layout, config.tp_depth)


def stage_layers(config: TrainConfig, num_stages: int) -> list[range]:
    """The layers of each stage, divided so that the slowest stage is as fast as possible."""
    return balance(layer_costs(Transformer(config.model, device="meta")), num_stages)


def _bucket_sizes(config: TrainConfig) -> dict[str, float]:
    """ZeRO's bucket sizes. LAMB sums norms over tp bucket by bucket, so a bucket must hold the same parameters on each.

    Where tp cuts the vocabulary unevenly, ranks would fill buckets differently: then one bucket holds all.
    """
    if config.optimizer == "lamb" and config.model.vocab_size % config.tp:
        return {"bucket_mb": 2.0**20, "first_bucket_mb": 2.0**20}
    return {"bucket_mb": config.bucket_mb}


def _data_parallel(config: TrainConfig, mesh: Mesh, stages: list[Transformer], num_stages: int):
    """The pipeline's modules and the optimizer: `zero` decides which of the 16 bytes per parameter a rank keeps."""
    sum_over, shares_ends = gradient_comm(mesh), config.model.tie_embeddings and num_stages > 1
    make_optimizer, options = optimizer_class(config, mesh), {"lr": config.lr, "betas": BETAS}
    if config.zero in (1, 2):
        groups = parameter_groups(_named(stages), config.weight_decay, config.optimizer)
        groups, tied = _tied_apart(groups) if shares_ends else (groups, [])
        optimizer = (WholeParameterZero if config.optimizer == "muon" else ZeroOptimizer)(
            groups,
            make_optimizer,
            sum_over,
            config.zero,
            reduce="sum",
            **_bucket_sizes(config),
            master_dtype=config.torch_master_dtype,
            reduce_dtype=config.torch_reduce_dtype,
            compress=gradient_compressor(config),
            **_offload(config),
            **options,
        )
        for group in tied:
            optimizer.add_param_group(group)
        list(optimizer.tensors_and_states())  # gives the masters their placements, which LAMB needs
        return stages, optimizer
    if config.zero == 3:
        cut_ends = not shares_ends  # tied gradients are summed over pp unsharded
        shards, replicas = sharding_comms(sum_over, config.replicate)
        computed = config.torch_dtype if config.mixed_precision else None
        precision = {"compute_dtype": computed, "reduce_dtype": config.torch_reduce_dtype}
        values = initial_values(config)
        # Masters are what FSDP shards; what it leaves whole it computes as it is, so that stays in half precision.
        for sharded in stages if cut_ends else (block for stage in stages for block in stage.layers.values()):
            sharded.to(config.torch_master_dtype)
        modules: list[nn.Module] = [
            FSDP(
                stage, shards, units=Block, reduce="sum", shard_rest=cut_ends, replicas=replicas, **precision,
                init_part=values, **_offload(config),
            )
            for stage in stages
        ]  # fmt: skip
    else:
        buckets = {"bucket_mb": config.bucket_mb, "first_bucket_mb": config.bucket_mb / 4}
        buckets["compress"] = gradient_compressor(config)
        if config.torch_reduce_dtype != config.torch_dtype:
            buckets["reduce_dtype"] = config.torch_reduce_dtype
        modules = [DDP(stage, sum_over, reduce="sum", **buckets) for stage in stages]
    groups = parameter_groups(_named(modules), config.weight_decay, config.optimizer)
    if config.offload != "none":
        optimizer = OffloadedOptimizer(modules, groups, make_optimizer, config.torch_master_dtype, **options)
        list(optimizer.tensors_and_states())  # as above
        return modules, optimizer
    if own := make_own_optimizer(config, groups, make_optimizer, sum_over, **options):
        return modules, own
    if config.mixed_precision:
        return modules, MasterWeights(groups, make_optimizer, **options)
    return modules, TorchOptimizerAdapter(make_optimizer(groups, **options))


def _tied_apart(groups: list[dict]) -> tuple[list[dict], list[dict]]:
    """Take the embedding and its copy on another stage out of the groups; return the others', and one group for each.

    ZeRO gives such a group a bucket of its own, and so cuts the two at the same places: ranks add their gradients in the
    same order, and they stay equal bit for bit.
    """
    places = {p: placement_of(p) for group in groups for p in group["params"]}
    ends = {p for p, place in places.items() if "embedding.weight" in (place.name, place.tied_to)}
    others = [{**group, "params": [p for p in group["params"] if p not in ends]} for group in groups]
    return others, [{**group, "params": [p]} for group in groups for p in group["params"] if p in ends]


def _offload(config: TrainConfig) -> dict:
    folder = None if config.offload_folder is None else str(config.offload_folder)
    return {} if config.offload == "none" else {"offload": config.offload, "folder": folder}


def sharding_comms(comm_of, replicate: int):
    """Cut the ranks with the same parameters into groups: return the ranks to shard over, and those with the same shard.

    Both are functions from a parameter to a Comm. Of ranks 0 to 3 with replicate=2, 0 and 1 share the shards, so do 2
    and 3; gradients are reduced inside these groups, then summed over 0 and 2, and over 1 and 3.
    """
    if replicate == 1:
        return comm_of, None

    @cache
    def cut(comm) -> tuple[Comm, Comm]:
        size = comm.size // replicate
        first = comm.rank // size * size
        same_shard = range(comm.rank % size, comm.size, size)
        return comm.subgroup(range(first, first + size), "shards"), comm.subgroup(same_shard, "replicas")

    return lambda param: cut(comm_of(param))[0], lambda param: cut(comm_of(param))[1]


def _named(modules: list[nn.Module]):
    return [named for module in modules for named in module.named_parameters()]
