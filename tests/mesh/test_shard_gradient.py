"""torch's clipping raises wherever this rank has a part of the gradients; minipar's gives the norm of one process."""

import pytest
import torch
from torch import nn

import minipar
from minipar import DDP, Mesh, ModelConfig, Transformer
from minipar.mesh import Placement, set_placement
from minipar.mesh.shard_gradient import ShardGradient
from minipar.pipeline import Pipeline, partition
from minipar.schedules import make_schedule
from minipar.tensor_parallel import tensor_parallel

CONFIG = ModelConfig(
    vocab_size=12, dim=8, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=8, max_seq_len=6
)


def batch():
    tokens = torch.randint(12, (4, 7), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def somebodys():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12)).double()


def ours():
    return Transformer(CONFIG, seed=0, dtype=torch.float64)


def loss_of(model):
    inputs, targets = batch()
    if isinstance(model, Transformer):
        return model.loss(inputs, targets)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def split(world, how):
    """Return a model of which this rank has a part, after its backward."""
    if how == "pipeline":
        return piped(world, "1f1b", tp=1)
    if how == "deferred":
        return piped(world, "zb-h1", tp=2)
    if how == "plan":
        plan = {"0": "vocab", "1": "column", "2": "row", "3": "gathered"}
        model = wrapped = tensor_parallel(somebodys(), world, plan=plan)
    else:
        mesh = Mesh(world, dp=world.size // 2, tp=2)
        model = tensor_parallel(ours(), mesh.comm("tp"))
        wrapped = DDP(model, mesh.comm("dp")) if how == "ddp" else model
    loss = wrapped.module.loss(*batch()) if how == "ddp" else loss_of(model)
    loss.backward()
    if how == "ddp":
        wrapped.synchronize()
    return model


def piped(world, schedule, tp):
    mesh = Mesh(world, pp=2, tp=tp)
    pp = mesh.comm("pp")
    stage = partition(ours(), 2)[pp.rank]
    tensor_parallel(stage, mesh.comm("tp"))
    Pipeline([stage], pp, make_schedule(schedule, 2, 2)).step(*batch())
    return stage


def _clipped(world, how):
    model = split(world, how)
    for foreach in (False, True):
        with pytest.raises(RuntimeError, match="use minipar.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
    return minipar.clip_grad_norm_(model.parameters(), 0.1, world)


@pytest.mark.parametrize(
    ("how", "ranks"), [("plan", 2), ("model", 2), ("ddp", 4), ("pipeline", 2), ("deferred", 4)]
)
def test_torchs_clipping_raises_where_a_rank_has_a_part(how, ranks):
    model = somebodys() if how == "plan" else ours()
    loss_of(model).backward()
    want = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for norm in minipar.run(_clipped, how, world_size=ranks):
        assert norm.item() == pytest.approx(want.item(), rel=1e-10)


def test_a_whole_gradient_stays_a_tensor_and_a_part_is_marked_once():
    whole, part = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    set_placement(whole, Placement.whole("a", [4]))
    for _ in range(2):
        set_placement(part, Placement.whole("b", [4]).shard(0, 0, 2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    set_placement(frozen, Placement.whole("c", [4]).shard(0, 0, 2))
    assert not frozen.requires_grad
    for _ in range(2):
        (whole.sum() + part.sum()).backward()
    assert len(part._post_accumulate_grad_hooks) == 1
    assert (type(whole.grad), type(part.grad)) == (torch.Tensor, ShardGradient)
    assert torch.equal(part.grad, torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match=r"gradient.as_subclass\(torch.Tensor\) has the norm"):
        part.grad.norm()
    assert part.grad.as_subclass(torch.Tensor).norm() == 8**0.5
