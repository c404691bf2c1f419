"""Text from a trained model, on any mesh of tp and pp ranks, which may differ from the mesh of the training.

For each token, the stages compute one after another, and the tp ranks of a stage together; each rank caches the keys and
values of its own layers and heads. One rank chooses the next token and broadcasts it, so all ranks have the same text even
if the last bits of their logits differ. While one stage computes, the other stages wait: pp allows a larger model, but does
not generate a text faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.mesh_rules import check_tensor_parallel
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.expert import expert_parallel
from minipar.mesh import Mesh, Placement, placement_of, set_placement
from minipar.model import Transformer
from minipar.model.sampling import checked_prompt, choose_rows, continue_text
from minipar.pipeline.partition import balance, layer_costs
from minipar.runtime.launch import run
from minipar.tensor_parallel import tensor_parallel
from minipar.train.checkpoint.restore import Checkpoint, CheckpointRef, newest_whole
from minipar.train.data.tokenizer import Ids, codec_of_run
from minipar.train.state import BUFFER, PARAMETER


def generate_text(
    run_folder: Path,
    prompt: str,
    num_tokens: int = 300,
    temperature: float = 0.0,
    tp: int = 1,
    pp: int = 1,
    seed: int = 0,
    timeout_s: float = 60.0,
) -> str:
    """Continue `prompt` by `num_tokens` tokens with a run's newest checkpoint, on tp x pp local ranks; return all the text.

    At temperature 0, and above it for a given seed, every mesh generates the same text, unless two tokens are
    equally likely up to rounding. Tokens are bytes, or those of the run's tokenizer.
    Raises ValueError before any rank starts for a folder without a complete checkpoint, an empty prompt, a negative number,
    or a mesh over which the model cannot be split; RankError if a rank fails.
    """
    path = newest_whole(Path(run_folder) / CHECKPOINTS, {PARAMETER, BUFFER})
    if path is None:
        raise ValueError(f"{run_folder} has no whole checkpoint; train with --checkpoint-every first")
    checkpoint = Checkpoint(path)
    config = ModelConfig(**checkpoint.extra["model"])
    codec = codec_of_run(Path(run_folder), checkpoint.extra)
    if not prompt:
        raise ValueError("prompt='' is empty; give at least one character to go on from")
    tokens = checked_prompt(config, codec.encode(prompt), num_tokens, temperature)
    check_mesh(config, tp, pp)
    text = run(
        _generate_rank, checkpoint.chosen, tp, pp, tokens, num_tokens, temperature, seed,
        world_size=tp * pp, backend="auto", timeout_s=timeout_s,
    )[0]  # fmt: skip
    return codec.decode(text.tolist())


def _generate_rank(world: Comm, chosen: CheckpointRef, tp: int, pp: int, *request: Any) -> Tensor:
    mesh = Mesh(world, tp=tp, pp=pp)
    return generate_on_mesh(load_stage(chosen.open(), mesh, world.device), mesh, *request)


SAMPLE_BYTES_PER_RANK = 16 << 20


def sample_text(
    world: Comm, config: TrainConfig, path: Path, num_tokens: int, temperature: float = 0.7
) -> str | None:
    """Generate text after a short fixed prompt with the weights of the checkpoint at `path`; return prompt and text.

    The prompt is "The ", or token 0 for a run on token ids without a tokenizer (`Ids`). The weights are split over pipeline
    stages, with enough ranks, if `world` has them, for each to hold at most about 16 MiB of weights.

    config  the TrainConfig of the run that `world` has trained. If that takes more ranks than there are layers, each layer
            is also split over config.tp ranks (if `world` is large enough, and the layout is 1d)
    Every rank calls this; rank 0 gets the text, the other ranks get None.
    """
    shapes = Transformer(config.model, device="meta", dtype=config.torch_dtype)
    layers = config.model.num_layers
    ranks = min(world.size, -(-sum(p.nbytes for p in shapes.parameters()) // SAMPLE_BYTES_PER_RANK))
    pp = min(ranks, layers)
    cut = ranks > layers and pp * config.tp <= world.size and config.tp_layout == "1d"
    tp = config.tp if cut else 1
    if world.rank >= pp * tp:
        return None
    mesh = Mesh(world.subgroup(range(pp * tp), "sample"), pp=pp, tp=tp)
    checkpoint = Checkpoint(path)
    stage = load_stage(checkpoint, mesh, world.device)
    codec = codec_of_run(config.folder, checkpoint.extra)
    prompt = codec.encode("0" if isinstance(codec, Ids) else "The ") or [0]
    text = generate_on_mesh(stage, mesh, prompt, num_tokens, temperature)
    return codec.decode(text.tolist()) if world.rank == 0 else None


def check_mesh(config: ModelConfig, tp: int, pp: int) -> None:
    """Raise ValueError if a model of these sizes cannot be cut into pp stages of tp ranks."""
    if not 1 <= pp <= config.num_layers:
        raise ValueError(
            f"pp={pp} stages of num_layers={config.num_layers} layers; use 1 to {config.num_layers}"
        )
    check_tensor_parallel(config, tp)


def load_stage(checkpoint: Checkpoint, mesh: Mesh, device: torch.device | None = None) -> Transformer:
    """Load this rank's stage of the model, cut over tp and ep, from a checkpoint. Reads only this rank's parts of weights.

    Each pp rank has one stage; layers are divided among stages as in training. The checkpoint may be from any mesh.
    """
    config, pp = ModelConfig(**checkpoint.extra["model"]), mesh.sizes["pp"]
    number = mesh.coordinates.pp
    layers = balance(layer_costs(Transformer(config, device="meta")), pp)[number]
    first, last = number == 0, number == pp - 1
    dtype = getattr(torch, checkpoint.extra["dtype"])
    stage = Transformer(config, layers=layers, first=first, last=last, device="meta", dtype=dtype)
    tensor_parallel(stage, mesh.comm("tp"))  # also if tp=1, because it sets every parameter's placement
    if mesh.sizes["ep"] > 1:
        expert_parallel(stage, mesh.comm("ep"))
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, _read(checkpoint, parameter, device))
    for name, buffer in list(stage.named_buffers()):
        owner, _, own_name = name.rpartition(".")
        stored = checkpoint.read(BUFFER, Placement.whole(name, buffer.shape))
        setattr(stage.get_submodule(owner), own_name, stored.to(device))
    return stage


def _read(checkpoint: Checkpoint, parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    placement = placement_of(parameter)
    stored = replace(placement, name=placement.tied_to or placement.name)
    value = checkpoint.read(PARAMETER, stored).to(device, parameter.dtype)
    parameter = nn.Parameter(value, requires_grad=False)
    set_placement(parameter, placement)
    return parameter


@torch.no_grad()
def generate_on_mesh(
    stage: Transformer,
    mesh: Mesh,
    prompt_tokens: Sequence[int] | Tensor,
    num_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Generate like `minipar.model.generate`, with one stage per pp rank, possibly cut over tp; every rank gets the text.

    stage  this rank's stage, from `load_stage`, or from `partition` and `tensor_parallel` without sequence parallelism

    Every rank calls this with its own `stage` and otherwise the same arguments. Along other mesh axes, each replica
    generates the same text. For B prompts of T tokens each, sends: from stage to stage, B*D elements for each of the
    T + num_tokens - 1 tokens processed, as long as the caches have room; over tp, the messages of these tokens' forward,
    including the gather of logits; and B int64 per chosen token, broadcast to all ranks.
    """
    tokens = checked_prompt(stage.config, prompt_tokens, num_tokens, temperature)
    pp, all_ranks = mesh.comm("pp"), mesh.comm("pp", "tp")
    chooser = all_ranks.size - mesh.sizes["tp"]  # the first rank of the last stage

    def next_token(unread: Tensor, position: int) -> Tensor:
        logits = _through_stages(stage, pp, unread)
        if all_ranks.rank == chooser:
            assert logits is not None
            token = choose_rows(logits[:, -1], temperature, seed, position)
        else:
            token = unread.new_empty(unread.shape[0], 1)
        chosen: Tensor = all_ranks.broadcast(token, root=chooser)
        return chosen

    text = continue_text(stage, tokens.reshape(-1, tokens.shape[-1]), num_tokens, next_token)
    return text[0] if tokens.dim() == 1 else text


def _through_stages(stage: Transformer, pp: Comm, tokens: Tensor) -> Tensor | None:
    """Run this rank's stage on these tokens: the last stage's ranks return the logits, the other ranks None."""
    x = tokens
    if not stage.first:
        dtype = next(stage.parameters()).dtype
        x = pp.recv((*tokens.shape, stage.config.dim), dtype, pp.rank - 1)
    out: Tensor = stage(x)
    if stage.last:
        return out
    pp.send(out, pp.rank + 1)
    return None
