"""A mixture of experts against a loop over tokens, written plainly; against finite differences; and its faults."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import minipar.model.moe as moe_module
import minipar.model.permute as permute_module
from minipar.config.model_config import ModelConfig
from minipar.config.moe_config import MoEConfig
from minipar.model import (
    MoE,
    Transformer,
    WeightGradients,
    defer_weight_gradients,
    moe_layers,
    set_num_groups,
    take_metrics,
    update_balance_bias,
)
from minipar.model.groups import RoutingGroups, check_whole_groups
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds, splits

D, HIDDEN = 4, 3


def make(num_experts=4, top_k=1, capacity_factor=1.25, seed=0, **options):
    return MoE(D, HIDDEN, num_experts, top_k, capacity_factor, seed=seed, **options).double()


def tokens(seed, B=2, T=9):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expert(moe, e, x):
    gate, up, down = (w[e] for w in (moe.experts.gate, moe.experts.up, moe.experts.down))
    return down @ (F.silu(gate @ x) * (up @ x))


def by_definition(moe, x):
    """Token after token, in the order of their positions. Returns y and, by group, how many chose and were served."""
    E, k, g = moe.options.num_experts, moe.options.top_k, moe.options.group_tokens or x.shape[1]
    factor = moe.options.capacity_factor
    capacity = math.inf if factor is None else math.ceil(round(k * g / E * factor, 9))
    y, load, kept = torch.zeros_like(x), [], []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if t % g == 0:
                load.append([0] * E)
                kept.append([0] * E)
            p = torch.exp(moe.router.weight @ x[b, t])
            p = p / p.sum()
            best = sorted(range(E), key=lambda e: (-p[e].item(), e))[:k]
            total = sum(p[e] for e in best) if k > 1 else 1
            for e in best:
                if kept[-1][e] < capacity:
                    kept[-1][e] += 1
                    y[b, t] = y[b, t] + p[e] / total * expert(moe, e, x[b, t])
                load[-1][e] += 1
    return y, torch.tensor(load), torch.tensor(kept), capacity


@st.composite
def drawn(draw):
    E = draw(st.integers(1, 6))
    moe = make(
        E,
        draw(st.integers(1, min(3, E))),
        draw(st.sampled_from([0.1, 0.5, 1.0, 1.1, 1.25, 2.0, None])),
        draw(seeds),
        group_tokens=draw(st.sampled_from([None, 1, 3, 4, 20])),
    )
    with torch.no_grad():
        moe.router.weight.mul_(draw(st.sampled_from([0.0, 1.0, 50.0])))  # 0: every choice is a tie
    return moe, tokens(draw(seeds), draw(st.integers(1, 3)), draw(st.integers(1, 10)))


def check_against_definition(moe, x):
    y, metrics = moe(x)
    want, load, kept, capacity = by_definition(moe, x)
    assert_equal_to(y, want, what="y")
    assert torch.equal(metrics.load, load.sum(0))
    assert torch.equal(metrics.kept_load, kept.sum(0))
    dropped = sum(max(0, int(n) - capacity) for n in load.flatten())
    assert int(metrics.dropped) == dropped
    assert int(metrics.kept) == x.shape[0] * x.shape[1] * moe.options.top_k - dropped
    assert metrics.drop_rate == pytest.approx(dropped / int(load.sum()))


@given(drawn=drawn())
def test_a_mixture_is_a_loop_over_tokens(drawn):
    check_against_definition(*drawn)


def crowded():
    """Two experts of which one has everything, and room for less than half."""
    moe = make(2, 2, 0.5)
    with torch.no_grad():
        moe.router.weight.zero_()
    return moe, tokens(0)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (
            "capacity off by one",
            lambda m: m.setattr(
                MoEConfig, "capacity", lambda self, g, right=MoEConfig.capacity: right(self, g) - 1
            ),
        ),
        (
            "k forgotten in the capacity",
            lambda m: m.setattr(
                MoEConfig,
                "capacity",
                lambda self, g: math.ceil(g / self.num_experts * self.capacity_factor),
            ),
        ),
        (
            "places counted from 1",
            lambda m: m.setattr(
                moe_module,
                "position_in_expert",
                lambda *a, right=moe_module.position_in_expert: right(*a) + 1,
            ),
        ),
        (
            "capacity for all samples together",
            lambda m: m.setattr(
                moe_module,
                "RoutingGroups",
                lambda B, T, g: RoutingGroups(1, B * T, B * T) if g == T else RoutingGroups(B, T, g),
            ),
        ),
        (
            "weights forgotten",
            lambda m: m.setattr(permute_module, "combine", lambda o, w, p: _combine(o, w > 0, p)),
        ),
    ],
)
def test_a_fault_is_noticed(monkeypatch, name, fault):
    check_against_definition(*crowded())
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_against_definition(*crowded())


_combine = permute_module.combine


@given(drawn=drawn(), padded=st.booleans(), shared=st.sampled_from([0, 3]))
@examples(8)
def test_gradients_are_those_of_finite_differences(drawn, padded, shared):
    moe, x = drawn
    options = {**moe.options.moe_options, "shared_dim": shared, "balance_coef": 0.3, "z_coef": 0.2}
    whole = MoE(D, HIDDEN, **options).double()
    whole.router.weight.data.copy_(moe.router.weight)
    whole.overrides.pad_to_capacity = padded
    if not whole.router.weight.any():
        whole.router.weight.data[:, 0] += 0.01 * torch.arange(options["num_experts"])  # no choice at a tie
    x = x[:1, :5].clone().requires_grad_()
    names, parameters = zip(*whole.named_parameters())

    def total(x, *values):
        y, metrics = torch.func.functional_call(whole, dict(zip(names, values)), (x,))
        return (y.square().sum() + y.sum()) + metrics.balance_loss + metrics.z_loss

    assert torch.autograd.gradcheck(total, (x, *parameters), eps=1e-7, atol=1e-5, rtol=1e-4)


def test_a_dispatch_under_no_grad_is_noticed(monkeypatch):
    """A seeded fault: rows are right, but nothing reaches what made them."""
    moe, x = make(), tokens(0).requires_grad_()
    moe(x)[0].sum().backward()
    right = x.grad
    monkeypatch.setattr(
        permute_module,
        "permute_rows",
        lambda x, plan, right=permute_module.permute_rows: right(x.detach(), plan),
    )
    x.grad = None
    moe(x)[0].sum().backward()
    with pytest.raises(AssertionError):
        assert_equal_to(x.grad, right)


@given(drawn=drawn(), keep=st.integers(1, 10))
def test_routing_in_order_of_position_is_causal(drawn, keep):
    """A prefix is routed as it is within the whole, so text generated token by token is the text scored at once."""
    moe, x = drawn
    if moe.options.group_tokens is None:
        return  # then the room depends on the length
    keep = min(keep, x.shape[1])
    assert_equal_to(moe(x[:, :keep])[0], moe(x)[0][:, :keep])


@pytest.mark.parametrize("options", [dict(drop_order="weight"), dict(router="expert_choice")])
def test_other_orders_look_into_the_future(options):
    moe, x = make(2, 1, 1.0, group_tokens=8, **options), tokens(1, 4, 8)
    assert not torch.allclose(moe(x[:, :4])[0], moe(x)[0][:, :4])


def test_the_heavier_choices_are_served_first_where_asked():
    moe, x = make(2, 1, 0.5, drop_order="weight"), tokens(3, 1, 8)
    with torch.no_grad():
        moe.router.weight[0] = x.mean((0, 1)) * 5
    routing = moe.route(moe.router(x, torch.arange(8), torch.arange(1)), RoutingGroups(1, 8, 8))
    for e in range(2):
        chose = routing.expert[:, 0] == e
        served, turned_away = (routing.weight[chose & (routing.kept[:, 0] == k), 0] for k in (True, False))
        if len(turned_away):
            assert len(served) == 2  # ceil(8 / 2 * 0.5)
            assert served.min() >= turned_away.max()


@given(seed=seeds, E=st.integers(1, 5), k=st.integers(1, 2), factor=st.sampled_from([0.5, 1.0, 2.0]))
def test_under_expert_choice_every_expert_takes_its_best_tokens(seed, E, k, factor):
    k = min(k, E)
    moe, x = make(E, k, factor, seed, router="expert_choice", group_tokens=4), tokens(seed, 2, 8)
    y, metrics = moe(x)
    capacity = min(4, math.ceil(k * 4 / E * factor))
    want = torch.zeros_like(x)
    for b in range(2):
        for start in (0, 4):
            group = x[b, start : start + 4]
            p = (group @ moe.router.weight.T).softmax(-1)
            for e in range(E):
                for t in p[:, e].sort(descending=True, stable=True).indices[:capacity]:
                    want[b, start + t] += p[t, e] * expert(moe, e, group[t])
    assert_equal_to(y, want)
    assert metrics.load.tolist() == metrics.kept_load.tolist() == [4 * capacity] * E
    assert metrics.balance_loss == 0


def test_one_loaded_expert_has_e_times_the_even_balance_loss():
    moe = make(4, 1, None, balance_coef=0.01, z_coef=0.0)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(4) * 100)
    even, one = torch.eye(4).repeat(1, 2, 1).double(), torch.eye(4)[:1].repeat(1, 8, 1).double()
    assert moe(even)[1].balance_loss.item() == pytest.approx(0.01)
    assert moe(one)[1].balance_loss.item() == pytest.approx(0.04)
    assert moe(one)[1].imbalance == 4
    assert moe(even)[1].imbalance == 1


@given(drawn=drawn())
def test_auxiliary_losses_are_the_papers_by_group(drawn):
    moe, x = drawn
    g, E = moe.options.group_tokens or x.shape[1], moe.options.num_experts
    balance, z = [], []
    for row in x:
        for group in row.split(g):
            logits = group @ moe.router.weight.T
            p = logits.softmax(-1)
            chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, : moe.options.top_k]
            f = torch.stack([(chosen == e).double().mean() for e in range(E)])
            balance.append(0.01 * E * (f * p.mean(0)).sum())
            z.append(0.001 * logits.exp().sum(-1).log().square().mean())
    _, metrics = moe(x)
    assert_equal_to(metrics.balance_loss, torch.stack(balance).mean(), floor=1e-12)
    assert_equal_to(metrics.z_loss, torch.stack(z).mean(), floor=1e-12)


@given(data=st.data(), seed=seeds, shared=st.sampled_from([0, 4]))
def test_batch_parts_knowing_the_group_count_sum_to_the_whole(data, seed, shared):
    config = ModelConfig(
        vocab_size=7,
        dim=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=3,
        max_seq_len=8,
        num_experts=3,
        moe_every=1,
    )
    config = ModelConfig(
        **{**vars(config), "shared_dim": shared, "group_tokens": 3, "top_k": 2, "balance_coef": 0.5}
    )
    model, text = (
        Transformer(config, seed).double(),
        torch.randint(7, (5, 8), generator=torch.Generator().manual_seed(seed)),
    )
    loss = model.loss(text, text)
    loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    whole = take_metrics(model)
    model.zero_grad()
    set_num_groups(model, config.num_groups(5, 8))
    parts = torch.arange(5).split(data.draw(splits(5, 3)))
    losses = [model.loss(text[rows], text[rows], sample_ids=rows, count=40) for rows in parts]
    sum(losses).backward()
    assert_equal_to(sum(losses).detach(), loss.detach())
    for name, p in model.named_parameters():
        assert_equal_to(p.grad, want[name], what=name)
    for name, metrics in take_metrics(model).items():
        assert torch.equal(metrics.load, whole[name].load)
        assert_equal_to(metrics.balance_loss, whole[name].balance_loss)


def test_parts_that_divide_by_their_own_groups_are_noticed():
    """A seeded fault: each microbatch's auxiliary loss is a mean over that microbatch."""
    config = ModelConfig(vocab_size=7, dim=4, num_layers=1, num_heads=2, num_experts=3, moe_every=1)
    model, text = Transformer(config).double(), torch.randint(7, (4, 8))
    model.loss(text, text).backward()
    want = model.layers["0"].mlp.router.weight.grad.clone()
    model.zero_grad()
    for rows in torch.arange(4).split(2):
        model.loss(text[rows], text[rows], count=32).backward()
    with pytest.raises(AssertionError):
        assert_equal_to(model.layers["0"].mlp.router.weight.grad, want)


def test_auxiliary_losses_are_in_the_gradients_but_not_the_loss():
    config = ModelConfig(
        vocab_size=7, dim=4, num_layers=2, num_heads=2, num_experts=3, moe_every=1, z_coef=0.3
    )
    model, text = Transformer(config).double(), torch.randint(7, (2, 6))
    model.loss(text, text).backward()
    weight = model.layers["0"].mlp.router.weight

    def objective():
        take_metrics(model)
        value = model.loss(text, text)
        return (value + sum(m.balance_loss + m.z_loss for m in take_metrics(model).values())).item()

    for index in ((0, 0), (2, 3)):
        values = []
        for step in (1e-6, -2e-6):
            weight.data[index] += step
            values.append(objective())
        weight.data[index] += 1e-6
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(weight.grad[index].item(), rel=1e-5, abs=1e-9)


@given(data=st.data(), seed=seeds)
def test_stages_one_after_the_other_are_the_whole_model(data, seed):
    """Auxiliary losses of a stage get their gradients there, though the loss is computed on another."""
    config = ModelConfig(
        vocab_size=7, dim=4, num_layers=3, num_heads=2, max_seq_len=8, num_experts=3, moe_every=1, top_k=2
    )
    whole = Transformer(config, seed)
    text = torch.randint(7, (3, 8), generator=torch.Generator().manual_seed(seed))
    loss = whole.loss(text, text)
    loss.backward()
    sizes = data.draw(splits(3, 2))
    stages = [
        whole.stage(range(sizes[0]), first=True, last=False),
        whole.stage(range(sizes[0], 3), first=False, last=True),
    ]
    hidden = stages[0](text)
    received = hidden.detach().requires_grad_()
    staged = stages[1].loss(received, text)
    staged.backward()
    hidden.backward(received.grad)
    assert torch.equal(staged, loss)
    found = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    for name, p in whole.named_parameters():
        assert torch.equal(found[name], p.grad), name


@given(drawn=drawn())
def test_weight_gradients_can_wait_and_are_the_same_bits(drawn):
    moe, x = drawn
    queue, hooks = WeightGradients(), []
    gradients = []
    for deferred in (None, queue):
        for p in moe.parameters():
            p.grad = None
        defer_weight_gradients(moe, deferred)
        handles = [p.register_post_accumulate_grad_hook(hooks.append) for p in moe.parameters()]
        y, metrics = moe(x)
        (y.sum() + metrics.z_loss).backward()
        for handle in handles:
            handle.remove()
        if deferred is not None:
            assert all(p.grad is None for p in moe.parameters())
            queue.run()
        gradients.append([p.grad for p in moe.parameters()])
    assert len(hooks) == len(gradients[0])  # those of the first backward alone
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def check_jitter_multiplies(router):
    """Each feature by a factor from [1 - jitter, 1 + jitter]: nothing changes sign, and nothing comes from 0."""
    router.weight.data.copy_(torch.eye(D))  # the logits are the features
    x = tokens(1, 20, 30)
    x[0] = 0
    factors = router(x, torch.arange(30), torch.arange(20)) / x
    assert torch.equal(factors[0].isnan(), torch.ones(30, D, dtype=torch.bool))
    assert 0.9 <= factors[1:].min() < 0.91
    assert 1.09 < factors[1:].max() <= 1.1


def test_jitter_that_is_added_is_noticed(monkeypatch):
    check_jitter_multiplies(make(jitter=0.1).router)

    def forward(self, x, positions, sample_ids, step=0):
        noise = self._uniform(x.shape[-1], 2, step, positions, sample_ids)
        return (x + self.jitter * (2 * noise - 1)) @ self.weight.T

    monkeypatch.setattr(moe_module.Router, "forward", forward)
    with pytest.raises(AssertionError):
        check_jitter_multiplies(make(jitter=0.1).router)


def test_training_router_noise_follows_sample_position_and_step():
    x, where = torch.ones(2, 3, D).double(), (torch.arange(3), torch.arange(2))
    jittered, noisy = make(jitter=0.1).router, make(router="noisy_top_k").router
    for router in (jittered, noisy):
        first = router(x, *where, step=1)
        assert torch.equal(first, router(x, *where, step=1))
        assert not torch.equal(first, router(x, *where, step=2))
        assert_equal_to(first[1:], router(x[1:], where[0], torch.tensor([1]), step=1))
        assert_equal_to(first[:, 1:], router(x[:, 1:], torch.arange(1, 3), where[1], step=1))
        router.eval()
        assert_equal_to(router(x, *where), x @ router.weight.T)
        router.train()
    assert_equal_to(jittered(x * 0, *where), torch.zeros(2, 3, 4).double())  # added noise would not vanish
    assert (jittered(x, *where) - x @ jittered.weight.T).abs().max() <= 0.1 * jittered.weight.abs().sum(
        1
    ).max()
    noisy.requires_grad_(False)
    noise = noisy(torch.zeros(400, 50, D).double(), torch.arange(50), torch.arange(400)) / math.log(2)
    assert noise.mean().abs() < 0.02  # softplus(0) = log 2: what is left is standard normal
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert (noise.abs() < 1).double().mean() == pytest.approx(0.6827, abs=0.01)


def test_a_bf16_model_routes_in_float32():
    model = Transformer(ModelConfig(num_experts=4, num_layers=2, dim=32), dtype=torch.bfloat16)
    moe = dict(moe_layers(model))["layers.1.mlp"]
    assert moe.router.weight.dtype == torch.float32
    assert moe.experts.gate.dtype == torch.bfloat16
    text = torch.randint(256, (2, 16))
    model.loss(text, text).backward()
    assert {p.grad.dtype for p in moe.experts.parameters()} == {torch.bfloat16}
    logits = moe.router(torch.randn(2, 3, 32).bfloat16(), torch.arange(3), torch.arange(2))
    assert logits.dtype == torch.float32
    moe.to(torch.bfloat16)  # a cast model still computes logits in float32
    assert (
        moe.router(torch.randn(2, 3, 32).bfloat16(), torch.arange(3), torch.arange(2)).dtype == torch.float32
    )


def test_biases_alone_even_out_the_load():
    moe, x = make(4, 1, None, balance_bias=True, balance_coef=0.0), tokens(5, 4, 64)
    with torch.no_grad():
        moe.router.weight[0] = x.mean((0, 1)) * 3 + 0.5
    before = moe(x)[1].imbalance
    for _ in range(300):
        moe(x)
        update_balance_bias(moe, 0.001)
    assert before > 1.7
    assert moe(x)[1].imbalance < 1.3
    assert moe.balance_bias.sum().abs() < 0.5
    assert "balance_bias" in moe.state_dict()


def test_metrics_add_up_until_they_are_taken():
    moe = make(4, 2, 0.5)
    first, second = moe(tokens(0))[1], moe(tokens(1))[1]
    total = take_metrics(moe)[""]
    assert torch.equal(total.load, first.load + second.load)
    assert total.tokens == 36
    assert 0 < total.entropy <= math.log(4)
    assert not total.balance_loss.requires_grad
    assert take_metrics(moe) == {}


def test_a_dropped_token_gets_nothing_here_or_the_shared_expert_alone():
    for shared in (0, 3):
        moe, x = make(1, 1, 0.5, shared_dim=shared), tokens(0, 1, 4)
        y, metrics = moe(x)
        rest = moe.shared(x)[:, 2:] if shared else torch.zeros(1, 2, D).double()
        assert_equal_to(y[:, 2:], rest)
        assert int(metrics.unserved) == 2


def test_a_mixture_without_tokens_computes_too():
    for options in (dict(), dict(router="expert_choice"), dict(group_tokens=4, top_k=2)):
        moe = make(**options)
        y, metrics = moe(torch.zeros(0, 6, D, dtype=torch.float64, requires_grad=True))
        (y.sum() + metrics.balance_loss + metrics.z_loss).backward()
        assert all(p.grad is not None and not p.grad.any() for p in moe.parameters())
    assert make()(torch.zeros(6, D).double())[0].shape == (6, D)


def test_a_layer_keeps_two_hidden_rows_a_choice():
    """A choice's x, g, u and answer, a token's x and some numbers by expert; neither silu(g) nor the product."""
    moe, x = MoE(64, 128, 4, 2, None), torch.randn(1, 32, 64, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) if t.is_floating_point() else t,
        lambda t: t,
    ):
        y, _ = moe(x)
    weights = {p.untyped_storage().data_ptr() for p in moe.parameters()}
    elems = sum(t.untyped_storage().nbytes() // 4 for at, t in kept.items() if at not in weights)
    rows = 64
    want = rows * (64 + 2 * 128 + 64) + 32 * 64
    assert want <= elems <= want + 32 * 4 * 12  # and some numbers a token and expert


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(num_experts=0), "num_experts=0; use a whole number of 1 or more"),
        (dict(top_k=0), "top_k=0; use a whole number of 1 or more"),
        (dict(top_k=5), "top_k=5 exceeds num_experts=4; use 1 to 4"),
        (dict(capacity_factor=0), "capacity_factor=0.0 is not a share of the load; use a number above 0"),
        (dict(capacity_factor=-1.0), "capacity_factor=-1.0"),
        (dict(capacity_factor=math.nan), "capacity_factor=nan"),
        (dict(group_tokens=0), "group_tokens=0; use 1 or more, or None"),
        (dict(router="best"), "router='best' is unknown; use top_k, noisy_top_k or expert_choice"),
        (dict(drop_order="last"), "drop_order='last' is unknown; use position or weight"),
        (dict(jitter=1.0), "jitter=1.0.*use 0 <= jitter < 1"),
        (dict(balance_coef=-1), "balance_coef=-1.0 is not the weight of a loss"),
        (dict(z_coef=math.inf), "z_coef=inf"),
        (dict(router="expert_choice", capacity_factor=None), "capacity_factor=None.*do not go with"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(wrong, says):
    with pytest.raises(ValueError, match=says):
        make(**wrong)
    if wrong.get("num_experts") != 0:
        with pytest.raises(ValueError, match=says):
            ModelConfig(**{"num_experts": 4, **wrong})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_router_that_sees_nan_says_so(bad):
    x = tokens(0)
    x[1, 2, 0] = bad
    with pytest.raises(ValueError, match=r"nan or infinite for 1 of 18 tokens, the first at \(1, 2\)"):
        make()(x)
    bad_rows = make().eval()(x)[0].isnan().all(-1)
    assert bad_rows[1, 2]
    assert bad_rows.sum() == 1


def test_a_layout_that_cuts_a_group_is_refused():
    check_whole_groups(torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]), 4)  # zigzag, by whole groups
    check_whole_groups(torch.arange(8).expand(2, 8), None)
    for positions, size in (
        (torch.arange(2, 6), 4),
        (torch.arange(4, 8), None),
        (torch.tensor([0, 2, 1, 3]), 4),
    ):
        with pytest.raises(ValueError, match="not whole routing groups"):
            check_whole_groups(positions, size)
    config = ModelConfig(num_experts=2, group_tokens=4, dim=8, num_layers=2)
    with pytest.raises(ValueError, match=r"8 tokens at positions 2, 3 ... 9 .*group_tokens=4"):
        Transformer(config)(torch.zeros(1, 8, dtype=torch.int64), positions=torch.arange(2, 10))


def test_every_second_layer_has_experts_unless_told_otherwise():
    def layers(**kwargs):
        model = Transformer(ModelConfig(num_layers=4, dim=8, num_heads=2, num_experts=2, **kwargs))
        return [name for name, _ in moe_layers(model)]

    assert layers() == ["layers.1.mlp", "layers.3.mlp"]
    assert layers(moe_every=1) == [f"layers.{i}.mlp" for i in range(4)]
    assert [n for n, _ in MoE(8, 6, 2, shared_dim=4, router="noisy_top_k").named_parameters()] == [
        "router.weight",
        "router.noise.weight",
        "experts.gate",
        "experts.up",
        "experts.down",
        "shared.gate.weight",
        "shared.up.weight",
        "shared.down.weight",
    ]


def test_experts_start_like_other_layers():
    moe = dict(moe_layers(Transformer(ModelConfig(num_experts=4, num_layers=4))))["layers.3.mlp"]
    assert moe.experts.gate.std().item() == pytest.approx(0.02, rel=0.05)
    assert moe.experts.down.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert not torch.equal(moe.experts.up[0], moe.experts.up[1])


def test_evaluation_draws_no_second_expert_and_counts_no_load():
    moe, x = make(top_k=2, capacity_factor=None, random_second=True, balance_bias=True), tokens(0, T=32)
    moe.router.weight.data.mul_(100)  # so that the second expert is often unlikely
    assert not torch.equal(moe(x, step=0)[0], moe(x, step=1)[0])
    load = moe.load_since_update.clone()
    moe.eval()
    assert torch.equal(moe(x, step=0)[0], moe(x, step=1)[0])
    assert torch.equal(moe.load_since_update, load)
