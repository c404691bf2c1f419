"""Mistakes in a plan, and in what tp ranks are given, raise on every rank; a right plan trains as one process."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import minipar
from minipar.tensor_parallel import Column, Divided, full_state_dict, plan_checks, tensor_parallel
from tests.strategies import assert_equal_to

HEADS, HEAD_DIM = 4, 4
DIM = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Attention that keeps its number of heads, and has a norm of each head's queries."""

    def __init__(self, p: float):
        super().__init__()
        self.heads, self.p = HEADS, p
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm, self.scale = nn.LayerNorm(HEAD_DIM), nn.Parameter(torch.ones(HEAD_DIM))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if q.shape[-1] == HEAD_DIM:
            q, k = self.q_norm(q), k * self.scale
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, seed: int = 0, p: float = 0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.attention, self.norm = nn.Embedding(12, DIM), Attention(0.0), nn.LayerNorm(DIM)
        self.drop, self.head = nn.Dropout(p), nn.Linear(DIM, 12)
        self.double()

    def forward(self, tokens, cache=None):
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.drop(self.attention(x))))


PLAN = {
    "attention": Divided(("heads",)),
    "*.qkv": Column(unit=HEAD_DIM, parts=3),
    "*.out": "row",
    "*.q_norm": "summed",
    "*.scale": "summed",
    "head": "gathered",
}


def tokens_of(seed):
    return torch.randint(12, (2, 7), generator=torch.Generator().manual_seed(seed))


def step(model, tokens, targets=None):
    targets = tokens if targets is None else targets
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    loss.backward()
    return loss.item()


def trained(model, optimizer, steps=3):
    for number in range(steps):
        optimizer.zero_grad()
        step(model, tokens_of(number))
        optimizer.step()


def _optimizer_first(world):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    output = model(tokens_of(0))  # kept, and with it the graph of the whole model
    tensor_parallel(model, world, plan=PLAN)
    trained(model, optimizer)
    del output
    with pytest.raises(TypeError, match="a Comm cannot be deep-copied, nor a model that has one"):
        copy.deepcopy(model)
    return full_state_dict(model, world)


@pytest.mark.parametrize("tp", [2, 4])
def test_head_parameters_and_early_optimizers_match_one_process(tp):
    model = Model()
    trained(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    for state in minipar.run(_optimizer_first, world_size=tp):
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert_equal_to(state[name], value, floor=1e-12, what=name)


def _compiled(world):
    model = tensor_parallel(Model(), world, plan=PLAN)
    losses = [step(m, tokens_of(1)) for m in (torch.compile(model, backend="eager"), model)]
    return losses, step(Model(), tokens_of(1))


@pytest.mark.thorough  # it compiles for ten seconds
def test_a_split_model_may_be_compiled():
    for losses, want in minipar.run(_compiled, world_size=2):
        assert losses == pytest.approx([want] * 2, rel=1e-12)


def without(*patterns, **other):
    return {**{pattern: cut for pattern, cut in PLAN.items() if pattern not in patterns}, **other}


def _mistake(world, kind):
    model = Model(seed=world.rank if kind == "seed" else 0, p=0.5 if kind == "dropout" else 0.0)
    plan = {
        "norm": without("*.q_norm"),
        "parameter": without("*.scale"),
        "heads": without("attention", "*.q_norm", "*.scale"),
        "parts": without("*.qkv", **{"*.qkv": Column(unit=HEAD_DIM)}),
        "sum": {**PLAN, "norm": "summed"},
        "plans": without("head") if world.rank else PLAN,
    }.get(kind, PLAN)
    if kind == "zero":
        plan = without("*.q_norm")
        nn.init.zeros_(model.attention.out.weight)
    if kind == "shapes" and world.rank:
        model.head = nn.Linear(DIM, 16).double()
    tensor_parallel(model, world, plan=plan)
    torch.manual_seed(world.rank if kind == "dropout" else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2 if kind == "zero" else 1):
        optimizer.zero_grad()
        seed = number + (world.rank if kind == "batch" else 0)
        step(model, tokens_of(seed), tokens_of(9 + world.rank) if kind == "targets" else None)
        optimizer.step()


def _mistake_is_told(world, kind):
    with pytest.raises(ValueError) as caught:
        _mistake(world, kind)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("norm", "the gradient of attention.q_norm.weight, which every tp rank has whole, differs"),
        ("parameter", "the gradient of attention.scale, which every tp rank has whole, differs"),
        ("zero", "the gradient of attention.q_norm.weight, which every tp rank has whole, differs"),
        (
            "heads",
            "plan: the input of attention.out is not what it is in one process; give Column(unit=, parts=)",
        ),
        ("parts", "plan: the input of attention.out is not what it is in one process"),
        ("sum", 'the gradient of norm.weight is the same on every tp rank; do not plan it as "summed"'),
        ("seed", "models differ: embedding.weight is [12, 16] torch.float64 trained with checksum"),
        ("shapes", "models differ: head.weight is [12, 16] torch.float64 trained with checksum"),
        ("plans", "models differ: the cut of head is 'gathered' on rank 0, and missing on rank 1"),
        ("batch", "inputs of the model differ: input 0 is [2, 7] torch.int64"),
        ("targets", "give all tp ranks the same batch and, for dropout, the same torch.manual_seed"),
        ("dropout", "give all tp ranks the same batch and, for dropout, the same torch.manual_seed"),
    ],
)
def test_a_mistake_in_a_plan_or_between_ranks_raises_on_every_rank(kind, says):
    one, other = minipar.run(_mistake_is_told, kind, world_size=2)
    assert one == other
    assert says in one


def _calls(world):
    """Calls of the attention while the model is called with a cache, without, and again; and what was changed."""
    model, calls = Model(p=0.5), []
    tensor_parallel(model, world, plan=PLAN)
    model.drop.eval()
    model.attention.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    random = torch.get_rng_state()
    for cache in (object(), None, None):
        model(tokens_of(0), cache=cache)
        calls.append(None)
    modes = {name: module.training for name, module in model.named_modules()}
    return (
        calls,
        modes.pop("drop"),
        set(modes.values()),
        model.attention.heads,
        torch.equal(random, torch.get_rng_state()),
    )


def test_the_first_call_without_objects_reruns_and_restores_all():
    for result in minipar.run(_calls, world_size=2):
        assert result == ([True, None, False, False, True, None, True, None], False, {True}, HEADS // 2, True)


class Noisy(nn.Module):
    def forward(self, x):
        return x * torch.rand(())


def _dropped(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    model.insert(1, Noisy())
    tensor_parallel(model, world, plan={"0": "column", "3": "row"})
    model(torch.ones(1, 4))


def test_noise_and_dropout_of_split_features_are_no_mistake():
    minipar.run(_dropped, world_size=2)


class Remembering(nn.Module):
    """A layer that counts its calls in a buffer, sums inputs in another, and keeps the longest sequence's positions."""

    def __init__(self):
        super().__init__()
        self.layer, self.longest = nn.Linear(4, 4), 0
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("sum", torch.zeros(4))
        self.register_buffer("positions", torch.zeros(0))

    def forward(self, x):
        self.calls, self.drawn = self.calls + 1, torch.rand(())
        self.sum += x.detach().sum((0, 1))
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.positions = torch.arange(self.longest)
        return self.layer(x * self.positions[: x.shape[1], None])


def _remembered(world):
    model = Remembering()
    model.steps = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    tensor_parallel(model, world, plan={"layer": "gathered"})
    torch.manual_seed(1)
    drawn = torch.rand(2)
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.ones(1, 3, 4))
    assert model.drawn == drawn[1]
    return model.calls.item(), model.sum.tolist(), model.longest, len(model.positions)


def test_what_a_model_keeps_is_that_of_the_callers_own_calls():
    assert minipar.run(_remembered, world_size=2) == [(2.0, [6.0] * 4, 3, 3)] * 2


class Recomputed(Model):
    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.norm(x + checkpoint(self.attention, x, use_reentrant=True)))


def _recomputed(world):
    model = Recomputed()
    nn.init.zeros_(model.attention.out.weight)  # so that the first gradients in attention are zero
    tensor_parallel(model, world, plan=PLAN)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.3))
    return full_state_dict(model, world)


def test_gradients_of_a_nested_backward_are_checked_by_name():
    model = Recomputed()
    nn.init.zeros_(model.attention.out.weight)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.3))
    for state in minipar.run(_recomputed, world_size=2):
        for name, value in model.state_dict().items():
            assert_equal_to(state[name], value, floor=1e-12, what=name)


def _cast_and_moved(world):
    model = Model()
    tensor_parallel(model, world, plan=PLAN)
    model.float().double()
    trained(model, torch.optim.SGD(model.parameters(), lr=0.3))
    return model.attention.q_norm.weight.detach(), model.attention.scale.detach()


def test_a_cast_after_the_cut_keeps_sums_of_gradients():
    one, other = minipar.run(_cast_and_moved, world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(one, other))


def _thawed(world):
    model = Model()
    model.requires_grad_(False)
    tensor_parallel(model, world, plan=PLAN)
    frozen = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(True)
    step(model, tokens_of(0))
    with pytest.raises(RuntimeError, match="of which this rank has a part"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return frozen, model.attention.q_norm.weight.grad


def test_a_parameter_thawed_after_the_cut_is_summed_and_marked():
    model = Model()
    step(model, tokens_of(0))
    for frozen, gradient in minipar.run(_thawed, world_size=2):
        assert not any(frozen)
        assert_equal_to(gradient, model.attention.q_norm.weight.grad, floor=1e-14)


def test_checksums_tell_values_shapes_dtypes_and_what_is_trained():
    x = torch.arange(6.0)
    others = [x + 1, x.view(2, 3), x.double(), x.clone().requires_grad_(), x.to("meta")]
    assert len({plan_checks.described(y) for y in (x, *others)}) == 6
    assert plan_checks.described(x) == plan_checks.described(x.clone())


class Lora(nn.Module):
    """A layer with low-rank factors, as adapters replace it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def with_lora():
    torch.manual_seed(0)
    return nn.Sequential(Lora(nn.Linear(4, 8)), nn.GELU(), Lora(nn.Linear(8, 4))).double()


def _lora(world):
    with pytest.raises(
        ValueError, match=r"0 wraps 0.base_layer, as LoRA does; plan 0.base_layer in its place and"
    ):
        tensor_parallel(with_lora(), world, plan={"0": "column", "2": "row"})
    model = with_lora()
    plan = {"0.base_layer": "column", "0.lora_B": "column", "2.base_layer": "row", "2.lora_A": "row"}
    tensor_parallel(model, world, plan=plan)
    model(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)).square().sum().backward()
    return {
        name: p.grad for name, p in model.named_parameters() if name in ("0.lora_A.weight", "2.lora_B.weight")
    }


def test_low_rank_factors_are_planned_by_name():
    model = with_lora()
    model(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)).square().sum().backward()
    for gradients in minipar.run(_lora, world_size=2):
        for name, gradient in gradients.items():
            assert_equal_to(gradient, model.get_parameter(name).grad, floor=1e-14, what=name)


# The state that is gathered again ------------------------------------------------------------------------------------


def _gathered(world):
    """The state of a split model whose head is tied after the cut, and what is said of the ranks of another mesh axis."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)).double()
    mesh = minipar.Mesh(world, pp=2, tp=2)
    whole = {name: x.clone() for name, x in model.state_dict().items()}
    tensor_parallel(model, mesh.comm("tp"), plan={"0": "vocab", "1": "gathered"})
    model[1].weight = model[0].weight
    state = full_state_dict(model, mesh.comm("tp"))
    other = nn.Sequential(nn.Linear(4, 4)) if mesh.coordinates.pp else model
    tensor_parallel(
        other, world.subgroup([world.rank], "alone"), plan={"0": "column"}
    ) if mesh.coordinates.pp else None
    with pytest.raises(ValueError) as caught:
        full_state_dict(other, mesh.comm("pp"))
    return torch.equal(state["1.weight"], whole["0.weight"]), str(caught.value)


def test_a_head_tied_after_the_cut_is_whole_in_the_full_state():
    for equal, says in minipar.run(_gathered, world_size=4):
        assert equal
        assert (
            "the ranks' parameters differ: 0.weight is [8, 4] on rank 0, and [4, 4] on rank 1; pass the ranks"
            in says
        )
