"""Models of other classes, split by a plan: equal to one process over drawn sizes; Hugging Face's on dp x tp x pp."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.mesh import Mesh
from minipar.pipeline import Pipeline, partition
from minipar.schedules import make_schedule
from minipar.tensor_parallel import Column, Divided, by_plan, full_state_dict, tensor_parallel
from tests.strategies import assert_equal_to, seeds

VOCAB = 12


class Conv1D(nn.Module):
    """A linear layer with its weight stored [D, F], as in GPT-2."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Somebody's attention: one layer for q, k and v, and the number of heads is asked of the tensors."""

    def __init__(self, dim: int, head_dim: int, conv: bool):
        super().__init__()
        self.head_dim, self.width = head_dim, dim
        self.qkv = Conv1D(3 * dim, dim) if conv else nn.Linear(dim, 3 * dim)
        self.out = Conv1D(dim, dim) if conv else nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        heads = [
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split(self.width, -1)
        ]
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim: int, head_dim: int, hidden: int, conv: bool):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), Attention(dim, head_dim, conv)
        self.up = Conv1D(hidden, dim) if conv else nn.Linear(dim, hidden)
        self.down = Conv1D(dim, hidden) if conv else nn.Linear(hidden, dim)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


def somebodys_model(tp: int, heads: int, head_dim: int, hidden: int, conv: bool, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    dim = tp * heads * head_dim
    layers = [Layer(dim, head_dim, tp * hidden, conv) for _ in range(2)]
    return nn.Sequential(nn.Embedding(tp * VOCAB, dim), *layers, nn.Linear(dim, tp * VOCAB)).double()


def plan_of(head_dim: int):
    return {
        "0": "vocab",
        "*.attention": Divided(("width",)),
        "*.qkv": Column(unit=head_dim, parts=3),
        "*.out": "row",
        "*.up": "column",
        "*.down": "row",
        "3": "gathered",
    }


def trained(model, tokens, steps=2):
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _tokens(seed: int, vocab: int):
    return torch.randint(vocab, (2, 8), generator=torch.Generator().manual_seed(seed))


def _trained_on_ranks(world, sizes, seed):
    model = somebodys_model(world.size, *sizes, seed)
    tensor_parallel(model, world, plan=plan_of(sizes[1]))
    losses = trained(model, _tokens(seed, VOCAB * world.size))
    return losses, full_state_dict(model, world), sum(p.numel() for p in model.parameters())


sizes = st.tuples(st.integers(1, 2), st.sampled_from([1, 2, 6]), st.integers(1, 3), st.booleans())


@given(tp=st.integers(1, 4), sizes=sizes, seed=seeds)
def test_a_model_of_any_class_trains_as_in_one_process(tp, sizes, seed):
    model = somebodys_model(tp, *sizes, seed)
    whole = sum(p.numel() for p in model.parameters())
    expected = trained(model, _tokens(seed, VOCAB * tp))
    for losses, state, held in minipar.run(_trained_on_ranks, sizes, seed, world_size=tp):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert_equal_to(state[name], value, floor=1e-12, what=name)
        norms_and_biases = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 1)
        assert held <= (whole - norms_and_biases) / tp + norms_and_biases


def _sent(world):
    """Bytes that this rank sends forward, and backward, for a column and a row layer."""
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
    tensor_parallel(mlp, world, plan={"0": "column", "2": "row"}, algorithm="ring")
    x = torch.ones(2, 6, 8, dtype=torch.float64, requires_grad=True)
    mlp(x).sum().backward()  # the first call and the first backward check the plan
    world.traffic.reset()
    y = mlp(x)
    forward = world.traffic.sent_bytes
    y.sum().backward()
    return forward, world.traffic.sent_bytes - forward


@pytest.mark.parametrize("tp", [2, 4])
def test_a_column_and_a_row_layer_send_one_all_reduce_each_way(tp):
    one_all_reduce = 2 * (tp - 1) * 2 * 6 * 8 * 8  # of all ranks: 2 (tp - 1) B T D elements of 8 bytes
    sent = minipar.run(_sent, world_size=tp)
    assert [sum(way) for way in zip(*sent)] == [one_all_reduce, one_all_reduce]


def fused_as_one(layer, dim, parts, comm):
    return whole_shard(layer, dim, 1, comm)


def bias_on_every_rank(self, x):
    return minipar.comm.autograd.all_reduce(self.comm, x @ self.weight + self.bias)


whole_shard = by_plan._shard_in_parts
FAULTS = {
    "q, k and v are cut as one": (by_plan, "_shard_in_parts", fused_as_one),
    "every rank adds the bias": (by_plan.TransposedRow, "forward", bias_on_every_rank),
}


def _planted(world, fault):
    place, name, wrong = FAULTS[fault]
    right = getattr(place, name)
    setattr(place, name, wrong)
    try:
        return _trained_on_ranks(world, (2, 2, 2, True), 0)[0]
    finally:
        setattr(place, name, right)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_change_the_losses(fault):
    expected = trained(somebodys_model(2, 2, 2, 2, True, 0), _tokens(0, VOCAB * 2))
    losses = minipar.run(_planted, fault, world_size=2)[0]
    assert losses != pytest.approx(expected, rel=1e-6)


def _refused(world, plan, wrap, options):
    model = somebodys_model(1, 3, 4, 6, False, 0)
    before = copy.deepcopy(model.state_dict())
    if wrap == "tie":
        model[3].weight = model[0].weight
    given_model = DDP(model, world) if wrap == "ddp" else model
    with pytest.raises(ValueError) as caught:
        tensor_parallel(given_model, world, plan=plan, **options)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items() if name != "3.weight")
    return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "wrap", "options", "says"),
    [
        ({"*.q_proj": "column"}, None, {}, "matches no module; their names end in norm, attention, qkv, out, up or down"),
        ({"*.up": "column", "1.up": "row"}, None, {}, "plan: two patterns match 1.up, the second is '1.up'"),
        ({"*.up": "columns"}, None, {}, "'columns' for 1.up is unknown; use column, row, gathered, vocab or summed, C"),
        ({"*.norm": "column"}, None, {}, "normalization.LayerNorm; the cut 'column' is for a torch.nn.Linear, or a Conv1D"),
        ({"0": "row"}, None, {}, "0 is a torch.nn.modules.sparse.Embedding; the cut 'row' is for a torch.nn.Linear"),
        ({"*.qkv": Column(unit=4, parts=3)}, None, {}, "1.attention.qkv has 36 features in units of 12, which tp=2 ranks"),
        ({"*.out": "row", "*.attention": Divided(("heads",))}, None, {}, "1.attention.heads is None, which tp=2 does not"),
        ({"*.out": "row", "*.attention": "summed"}, None, {}, '1.attention is "summed" but 1.attention.out is split'),
        ({"3": "gathered"}, "tie", {}, "3.weight is tied to 0.weight: leave both out of the plan, or untie them first"),
        ({"*.up": "column"}, "ddp", {}, "is in data parallelism already; cut over tp first"),
        ({"*.up": "column"}, None, {"chunked": True}, "sequence_parallel, chunked and pad_vocab are for minipar's"),
        ("bert", None, {}, "plan='bert' is unknown; use llama or gpt2, or module names and their cuts"),
        ("llama", None, {}, "plan='llama' reads the sizes of heads from model.config, which this model lacks; set it"),
        (None, None, {}, "a Sequential is split by a plan of its modules; use plan={...}"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_before_anything_changes(plan, wrap, options, says):
    assert says in minipar.run(_refused, plan, wrap, options, world_size=2)[0]


def of_llama(norm=None, **config):
    """A module with the names that the plan "llama" looks at, and its configuration."""
    model = nn.Module()
    model.attention = nn.Module()
    if norm is not None:
        model.attention.q_norm = nn.LayerNorm(norm)
    model.config = SimpleNamespace(hidden_size=16, num_attention_heads=4, **config)
    return model


def test_the_plan_of_llama_keeps_the_heads_of_its_configuration():
    assert by_plan.PLANS["llama"](of_llama(head_dim=8))["*.q_proj"] == Column(unit=8)
    plan = by_plan.PLANS["llama"](of_llama(norm=4))
    assert (plan["*.k_proj"], plan["*.q_norm"], "*.k_norm" in plan) == (Column(unit=4), "summed", False)
    with pytest.raises(
        ValueError, match=r"attention.q_norm.weight has shape \[16\], not \[4\] as a norm of each head"
    ):
        by_plan.PLANS["llama"](of_llama(norm=16))


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 2


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("module", "cut", "says"),
    [
        (lambda: Scaled(4, 2), "vocab", "0 is a Scaled with a forward of its own, which a cut would drop; leave it out"),
        (lambda: Doubled(4, 4), "column", "0 is a Doubled with a forward of its own, which a cut would drop"),
        (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "row", "0 has a hook, a parametrization or"),
        (lambda: hooked(nn.Linear(4, 4)), "row", "0 has a hook, a parametrization or a forward of its own, which a cut"),
        (lambda: nn.Embedding(4, 2, max_norm=0.0), "vocab", "0 has max_norm=0.0, which a cut would drop; leave it out of"),
        (lambda: nn.Embedding(4, 2, scale_grad_by_freq=True), "vocab", "0 has scale_grad_by_freq=True, which a cut would"),
        (lambda: nn.Embedding(4, 2, sparse=True), "vocab", "0 has sparse=True, which a cut would drop"),
    ],
)  # fmt: skip
def test_a_layer_that_does_more_than_its_product_is_refused(module, cut, says):
    def refused(world):
        model = nn.Sequential(module())
        with pytest.raises(ValueError, match=says):
            tensor_parallel(model, world, plan={"0": cut})

    minipar.run(refused, world_size=2)


def test_a_model_is_split_once():
    def twice(world):
        model = tensor_parallel(somebodys_model(2, 2, 2, 2, False, 0), world, plan=plan_of(2))
        with pytest.raises(
            ValueError, match="0.weight is split already; split each model once, with one plan for all"
        ):
            tensor_parallel(model, world, plan={"3": "gathered"})

    minipar.run(twice, world_size=2)


def _padded(world, padding_idx):
    """This rank's rows of the gradient of an embedding in which one row is padding."""
    model = nn.Sequential(nn.Embedding(6, 2, padding_idx=padding_idx))
    tensor_parallel(model, world, plan={"0": "vocab"})
    model(torch.arange(6)[None]).sum().backward()
    return model[0].weight.grad


@pytest.mark.parametrize("padding_idx", [0, 2, 3, -1])
def test_a_row_of_padding_gets_no_gradient_whichever_rank_has_it(padding_idx):
    parts = minipar.run(_padded, padding_idx, world_size=3)
    want = torch.ones(6, 2)
    want[padding_idx] = 0
    assert torch.equal(torch.cat(parts), want)


def _cut_after_a_backward(world):
    """A gradient from before the cut, and the shapes of the whole state, which has buffers, too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.ones(2, 4)).sum().backward()
    want = {name: x.shape for name, x in model.state_dict().items()}
    tensor_parallel(model, world, plan={"0": "gathered"})
    assert {name: x.shape for name, x in full_state_dict(model, world).items()} == want
    return model[0].weight.grad


def test_a_cut_drops_gradients_and_a_whole_state_has_buffers():
    assert minipar.run(_cut_after_a_backward, world_size=2) == [None, None]


def test_a_convolution_called_conv1d_is_no_linear_layer():
    def refused(world):
        convolution = type("Conv1D", (nn.Conv1d,), {})(4, 4, 1)
        with pytest.raises(ValueError, match="Conv1D; the cut 'column' is for .* a Conv1D as in GPT-2"):
            tensor_parallel(nn.Sequential(convolution), world, plan={"0": "column"})

    minipar.run(refused, world_size=2)


# Hugging Face's models --------------------------------------------------------------------------------------------------


class First(nn.Module):
    """Embeddings of a Hugging Face model, as the first layer of a stack."""

    def __init__(self, tokens, positions=None):
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, x):
        x_of_tokens = self.tokens(x)
        return x_of_tokens if self.positions is None else x_of_tokens + self.positions.weight[: x.shape[1]]


class Inner(nn.Module):
    """A block of a Hugging Face model, from one tensor to one tensor."""

    def __init__(self, block, rotary=None):
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x):
        if self.rotary is None:
            return self.block(x)
        return self.block(x, position_embeddings=self.rotary(x, torch.arange(x.shape[1])[None]))


def hugging_face(name):
    """Return a small Llama or GPT-2 of random weights, and its layers as a stack."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).double()
        inside = model.model
        blocks = [Inner(block, inside.rotary_emb) for block in inside.layers]
        return model, nn.Sequential(First(inside.embed_tokens), *blocks, inside.norm, model.lm_head)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double()
    inside = model.transformer
    blocks = [Inner(block) for block in inside.h]
    return model, nn.Sequential(First(inside.wte, inside.wpe), *blocks, inside.ln_f, model.lm_head)


def batch(step, size=8):
    return torch.randint(VOCAB, (size, 9), generator=torch.Generator().manual_seed(step))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _on_a_mesh(world, name, wrapper):
    """Losses of three steps on dp 2 x tp 2 x pp 2; None where the first stage is."""
    mesh = Mesh(world, dp=2, tp=2, pp=2)
    model, stack = hugging_face(name)
    stack.config = model.config
    stage = partition(stack, 2)[mesh.comm("pp").rank]
    stage.config = model.config
    tensor_parallel(stage, mesh.comm("tp"), plan=name)
    dp = mesh.comm("dp")
    wrapped = DDP(stage, dp) if wrapper == "ddp" else FSDP(stage, dp) if wrapper == "fsdp" else stage
    if wrapper == "zero":
        optimizer = ZeroOptimizer(stage.parameters(), torch.optim.AdamW, dp, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    pipeline = Pipeline([wrapped], mesh.comm("pp"), make_schedule("1f1b", 2, 2), loss_of)
    losses = []
    for step in range(3):
        samples = batch(step).chunk(2)[dp.rank]
        optimizer.zero_grad()
        loss = pipeline.step(samples[:, :-1], samples[:, 1:])
        optimizer.step()
        losses.append(None if loss is None else dp.all_reduce(loss.detach().clone()).item() / 2)
    return losses


def with_norms_of_heads(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).double()


def _norms_of_heads(world, kind):
    model = with_norms_of_heads(kind)
    if world is not None:
        tensor_parallel(model, world, plan="llama")
    loss_of(model(input_ids=batch(0)[:, :-1]).logits, batch(0)[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters() if "norm" in name}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "rtol"), [("Qwen3", 1e-10), ("Gemma3Text", 1e-5)]
)  # Gemma's norms are in float32
def test_norms_of_heads_get_the_gradients_of_one_process(kind, rtol):
    expected = _norms_of_heads(None, kind)
    assert sum("q_norm" in name or "k_norm" in name for name in expected) == 2
    for gradients in minipar.run(_norms_of_heads, kind, world_size=2):
        for name, gradient in gradients.items():
            assert_equal_to(gradient, expected[name], rtol, 1e-14, name)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "wrapper"), [("llama", "ddp"), ("gpt2", "zero"), ("llama", "fsdp")])
def test_hugging_faces_models_train_on_dp_tp_and_pp_as_in_one_process(name, wrapper):
    model, _ = hugging_face(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(input_ids=batch(step)[:, :-1]).logits, batch(step)[:, 1:])
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    losses = minipar.run(_on_a_mesh, name, wrapper, world_size=8)
    assert sum(of_rank == [None] * 3 for of_rank in losses) == 4
    for of_rank in losses:
        assert of_rank == [None] * 3 or of_rank == pytest.approx(expected, rel=1e-10)
