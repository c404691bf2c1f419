"""Text from a trained model, on any mesh of tp and pp ranks, whatever mesh it was trained on.

A token goes through the stages one after another, and the ranks of a stage compute it together; each keeps the keys and
values of its own layers and heads. One rank chooses the next token and tells all, so that there is one text even where
two ranks' last bits are not the same. While one stage computes, the others wait: pp makes room for a large model, it
does not make one text faster.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from minipar.mesh import Mesh, Placement, placement_of, set_placement
from minipar.model import ModelConfig, Transformer
from minipar.model.sampling import checked_prompt, choose, continue_text
from minipar.pipeline.partition import balance, layer_costs
from minipar.runtime.launch import run
from minipar.tensor_parallel import check_tensor_parallel, tensor_parallel
from minipar.train.restore import Checkpoint, newest_whole
from minipar.train.state import BUFFER, PARAMETER
from minipar.train.trainer import CHECKPOINTS


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
    """Continue `prompt` by `num_tokens` bytes with the newest checkpoint of a run, on tp x pp local ranks; the whole text.

    At temperature 0, and above it for one seed, every mesh writes the same text, but where two bytes are equally
    likely up to rounding. Bytes that are not UTF-8 become replacement characters.
    Raises ValueError for a folder without a whole checkpoint, an empty prompt, a negative number, or a mesh for which
    the model cannot be cut, before any rank starts; RankError where a rank fails.
    """
    path = newest_whole(Path(run_folder) / CHECKPOINTS)
    if path is None:
        raise ValueError(f"{run_folder} has no whole checkpoint; train with --checkpoint-every first")
    config = ModelConfig(**Checkpoint(path).extra["model"])
    if not prompt:
        raise ValueError("prompt='' is empty; give at least one character to go on from")
    tokens = checked_prompt(config, list(prompt.encode()), num_tokens, temperature)
    check_mesh(config, tp, pp)
    text = run(
        _generate_rank, path, {"tp": tp, "pp": pp}, tokens, num_tokens, temperature, seed,
        world_size=tp * pp, timeout_s=timeout_s,
    )[0]  # fmt: skip
    return bytes(text.clamp(max=255).tolist()).decode(errors="replace")


def _generate_rank(world, path: Path, mesh_sizes: dict[str, int], *request) -> Tensor:
    mesh = Mesh(world, **mesh_sizes)
    return generate_on_mesh(load_stage(Checkpoint(path), mesh, world.device), mesh, *request)


def check_mesh(config: ModelConfig, tp: int, pp: int) -> None:
    """Raise ValueError where a model of these sizes cannot be cut into pp stages of tp ranks."""
    if not 1 <= pp <= config.num_layers:
        raise ValueError(
            f"pp={pp} stages of num_layers={config.num_layers} layers; use 1 to {config.num_layers}"
        )
    check_tensor_parallel(config, tp)


def load_stage(checkpoint: Checkpoint, mesh: Mesh, device=None) -> Transformer:
    """This rank's stage of the model in a checkpoint, cut over tp; of its weights only this rank's parts are read.

    One stage a pp rank, cut where training cuts them. The checkpoint may have been written on any mesh.
    """
    config, pp = ModelConfig(**checkpoint.extra["model"]), mesh.sizes["pp"]
    number = mesh.coordinates.pp
    layers = balance(layer_costs(Transformer(config, device="meta")), pp)[number]
    first, last = number == 0, number == pp - 1
    dtype = getattr(torch, checkpoint.extra["dtype"])
    stage = Transformer(config, layers=layers, first=first, last=last, device="meta", dtype=dtype)
    tensor_parallel(stage, mesh.comm("tp"))  # of tp=1 too: it says of every parameter what it is a part of
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, _read(checkpoint, parameter, device))
    for name, buffer in list(stage.named_buffers()):
        owner, _, own_name = name.rpartition(".")
        stored = checkpoint.read(BUFFER, Placement.whole(name, buffer.shape))
        setattr(stage.get_submodule(owner), own_name, stored.to(device))
    return stage


def _read(checkpoint: Checkpoint, parameter: nn.Parameter, device) -> nn.Parameter:
    placement = placement_of(parameter)
    stored = replace(placement, name=placement.tied_to or placement.name)
    value = checkpoint.read(PARAMETER, stored).to(device, parameter.dtype)
    parameter = nn.Parameter(value, requires_grad=False)
    set_placement(parameter, placement)
    return parameter


@torch.no_grad()
def generate_on_mesh(
    stage: Transformer, mesh: Mesh, prompt_tokens, num_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """`minipar.model.sampling` of a model of which each pp rank has a stage, cut over tp or not; every rank gets the text.

    stage  this rank's: of `load_stage`, or of `partition` and `tensor_parallel` without sequence parallelism

    Every rank calls this with the same prompt and numbers. With other axes in the mesh, each of their replicas writes.
    Sends, of B texts with T tokens in the prompt, between neighbouring stages B*D elements for each of the T + num_tokens
    - 1 tokens read, while nothing ends the caching; over tp what the forward of these tokens sends, their logits
    included; and each chosen token, B int64, to all.
    """
    tokens = checked_prompt(stage.config, prompt_tokens, num_tokens, temperature)
    pp, all_ranks = mesh.comm("pp"), mesh.comm("pp", "tp")
    chooser = all_ranks.size - mesh.sizes["tp"]  # the first rank of the last stage
    generator = torch.Generator().manual_seed(seed)

    def next_token(unread: Tensor) -> Tensor:
        logits = _through_stages(stage, pp, unread)
        if all_ranks.rank == chooser:
            token = choose(logits[:, -1], temperature, generator)
        else:
            token = unread.new_empty(unread.shape[0], 1)
        return all_ranks.broadcast(token, root=chooser)

    text = continue_text(stage, torch.atleast_2d(tokens), num_tokens, next_token)
    return text[0] if tokens.dim() == 1 else text


def _through_stages(stage: Transformer, pp, tokens: Tensor) -> Tensor | None:
    """The logits of these tokens on the last stage's ranks."""
    x = tokens
    if not stage.first:
        dtype = next(stage.parameters()).dtype
        x = pp.recv((*tokens.shape, stage.config.dim), dtype, pp.rank - 1)
    out = stage(x)
    if stage.last:
        return out
    pp.send(out, pp.rank + 1)
    return None
