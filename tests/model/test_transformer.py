import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import Block, Transformer, cross_entropy_sum, initialize
from tests.strategies import assert_equal_to, seeds, splits

SIZES = dict(vocab_size=11, dim=8, num_layers=3, num_heads=2, num_kv_heads=1, max_seq_len=8)
CONFIG = ModelConfig(**SIZES)
TIED = ModelConfig(**SIZES, tie_embeddings=True)


def batch(seed=0, B=3, T=6, ignored=0.0):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(11, (2, B, T), generator=generator)
    return tokens, targets.masked_fill(torch.rand(B, T, generator=generator) < ignored, -100)


def gradients(*modules):
    return {name: p.grad for module in modules for name, p in module.named_parameters()}


def test_names_are_canonical():
    block = "attention_norm attention.q attention.k attention.v attention.o mlp_norm mlp.gate mlp.up mlp.down"
    want = ["embedding", *(f"layers.{i}.{name}" for i in range(3) for name in block.split()), "norm", "head"]
    names = [f"{name}.weight" for name in want]
    assert list(dict(Transformer(CONFIG).named_parameters())) == names
    assert list(Transformer(CONFIG).state_dict()) == names
    assert list(dict(Transformer(TIED).named_parameters())) == names[:-1]
    assert list(Transformer(TIED).state_dict()) == names[:-1]
    assert sum(isinstance(m, Block) for m in Transformer(CONFIG).modules()) == 3


def test_a_stage_has_the_names_and_weights_of_the_whole_model():
    whole = Transformer(CONFIG, seed=4).state_dict()
    parts = [
        Transformer(CONFIG, 4, range(0, 1), last=False),
        Transformer(CONFIG, 4, range(1, 3), first=False),
    ]
    found = {name: w for part in parts for name, w in part.state_dict().items()}
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@given(data=st.data(), seed=seeds, tied=st.booleans(), dropout=st.sampled_from([0.0, 0.5]))
def test_stages_one_after_the_other_are_the_whole_model_bit_for_bit(data, seed, tied, dropout):
    config = ModelConfig(**SIZES, tie_embeddings=tied, dropout=dropout)
    whole = Transformer(config, seed)
    with torch.no_grad():
        for p in whole.parameters():
            p.mul_(1.5)  # the copies are of present values, not of initial ones
    sizes = data.draw(splits(3, data.draw(st.integers(1, 4))))
    starts = [sum(sizes[:s]) for s in range(len(sizes) + 1)]
    stages = [
        whole.stage(range(starts[s], starts[s + 1]), first=s == 0, last=s == len(sizes) - 1)
        for s in range(len(sizes))
    ]
    tokens, targets = batch(seed, ignored=0.3)
    loss = whole.loss(tokens, targets, step=2)
    loss.backward()
    x = tokens
    for stage in stages[:-1]:
        x = stage(x, step=2)
    staged = stages[-1].loss(x, targets, step=2)
    staged.backward()
    assert torch.equal(staged, loss)
    want, found = gradients(whole), gradients(*stages)
    if tied and len(stages) > 1:
        assert stages[-1].tied_copies == {"head.weight": "embedding.weight"}
        found["embedding.weight"] = found["embedding.weight"] + found.pop("head.weight")
    assert found.keys() == want.keys()
    for name in want:
        assert torch.equal(found[name], want[name]), name


def test_a_tied_stage_starts_from_the_embedding():
    whole = Transformer(TIED, seed=2)
    for last in (whole.stage([2], first=False, last=True), Transformer(TIED, 2, [2], first=False)):
        assert torch.equal(last.head.weight, whole.embedding.weight)
        assert last.head.weight is not whole.embedding.weight
        assert last.tied_copies == {"head.weight": "embedding.weight"}
    assert whole.tied_copies == {}
    assert Transformer(CONFIG, layers=[2], first=False).tied_copies == {}


def test_a_tied_weight_gets_the_gradients_of_both_its_uses():
    tokens, targets = batch()
    tied, free = Transformer(TIED, dtype=torch.float64), Transformer(CONFIG, dtype=torch.float64)
    free.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    for model in (tied, free):
        model.loss(tokens, targets).backward()
    assert_equal_to(tied.embedding.weight.grad, free.embedding.weight.grad + free.head.weight.grad)
    # the bug this guards against: each use keeping its own
    assert not torch.allclose(tied.embedding.weight.grad, free.embedding.weight.grad)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["own head", "tied"])
def test_the_blocks_of_a_stage_are_in_the_modes_that_they_had(config):
    whole = Transformer(config)
    whole.layers["1"].eval()
    for stage in (
        whole.stage(range(2), first=True, last=False),
        whole.stage(range(3), first=True, last=True),
    ):
        modes = {name: module.training for name, module in whole.named_modules()}
        assert all(module.training == modes[name] for name, module in stage.named_modules())
        assert stage.training
        assert not stage.layers["1"].training


def test_a_stage_is_a_copy():
    whole = Transformer(CONFIG).eval()
    stage = whole.stage([1], first=False, last=False)
    assert not stage.training
    with torch.no_grad():
        stage.layers["1"].mlp.up.weight.zero_()
    assert whole.layers["1"].mlp.up.weight.abs().sum() > 0


@given(seed=seeds, B=st.integers(1, 4), T=st.integers(1, 8), ignored=st.sampled_from([0.0, 0.5, 1.0]))
def test_loss_is_the_mean_over_the_targets_that_count(seed, B, T, ignored):
    model = Transformer(CONFIG, dtype=torch.float64)
    tokens, targets = batch(seed, B, T, ignored)
    loss = model.loss(tokens, targets)
    logp = model(tokens).log_softmax(-1)
    chosen = [-logp[b, t, targets[b, t]] for b in range(B) for t in range(T) if targets[b, t] != -100]
    if chosen:
        assert_equal_to(loss, torch.stack(chosen).mean())
        return
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@given(data=st.data(), seed=seeds)
def test_parts_of_a_batch_with_the_whole_count_sum_to_the_whole(data, seed):
    """Uneven parts, some empty, some with nothing to count; a mean of the parts' means would be wrong."""
    tokens, targets = batch(seed, B=5, ignored=0.6)
    model = Transformer(CONFIG, dtype=torch.float64)
    loss = model.loss(tokens, targets)
    loss.backward()
    want = {name: g.clone() for name, g in gradients(model).items()}
    model.zero_grad()
    count, total = int((targets != -100).sum()), 0.0
    for rows in torch.arange(5).split(data.draw(splits(5, 3))):
        part = model.loss(tokens[rows], targets[rows], sample_ids=rows, count=count)
        part.backward()
        total += part.detach()
    assert_equal_to(total, loss.detach(), floor=1e-13)
    for name, g in gradients(model).items():
        assert_equal_to(g, want[name], what=name)


def test_the_mean_of_the_parts_means_is_noticed():
    """A seeded fault: every part divides by its own count."""
    tokens, targets = batch(B=4, ignored=0.6)
    model = Transformer(CONFIG, dtype=torch.float64)
    means = [model.loss(tokens[r], targets[r]) for r in torch.arange(4).split([1, 3])]
    with pytest.raises(AssertionError):
        assert_equal_to(sum(means) / 2, model.loss(tokens, targets))


def test_tokens_are_known_by_their_positions_not_by_their_place():
    """Shuffle the batch's rows, and tell each where it was: dropout and rotations follow."""
    model, (tokens, _) = Transformer(ModelConfig(**SIZES, dropout=0.3)), batch(B=4)
    order = torch.tensor([2, 0, 3, 1])
    positions = torch.arange(6).expand(4, 6)
    assert torch.equal(
        model(tokens[order], positions, sample_ids=order, step=1), model(tokens, step=1)[order]
    )
    assert not torch.allclose(model.eval()(tokens, torch.arange(6) * 7), model(tokens))


@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize("shape", [(0, 6), (2, 1), (1, 1)])
def test_a_rank_with_no_tokens_or_one_computes_too(attention, shape):
    model = Transformer(ModelConfig(**SIZES, attention=attention, dropout=0.1))
    tokens = torch.zeros(shape, dtype=torch.int64)
    loss = model.loss(tokens, tokens)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bf16_trains_and_its_loss_is_float32():
    model, (tokens, targets) = Transformer(CONFIG, dtype=torch.bfloat16), batch()
    loss = model.loss(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert abs(loss.item() - Transformer(CONFIG).loss(tokens, targets).item()) < 0.02


def test_cross_entropy_takes_any_leading_shape():
    logits, targets = torch.randn(2, 3, 4, 11, dtype=torch.float64), torch.randint(11, (2, 3, 4))
    assert_equal_to(
        cross_entropy_sum(logits, targets), -logits.log_softmax(-1).gather(-1, targets[..., None]).sum()
    )


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda m: m(torch.zeros(2, 3)), r"tokens are float32 \[2, 3\].*int64 tokens \[B, T\]"),
        (lambda m: m(torch.zeros(3, dtype=torch.int64)), r"tokens are int64 \[3\]"),
        (lambda m: m(torch.zeros(2, 9, dtype=torch.int64)), "9 tokens a sample exceed max_seq_len=8"),
        (
            lambda m: m(batch()[0], positions=torch.arange(5)),
            r"positions has shape \(5,\); use \(6,\) or \(3, 6\)",
        ),
        (lambda m: m(batch()[0], sample_ids=torch.arange(4)), r"sample_ids has shape \(4,\); use \(3,\)"),
        (lambda m: m.loss(batch()[0], batch(T=5)[1]), r"targets has shape \(3, 5\); use \(3, 6\)"),
        (lambda m: m.stage([1], False, False)(batch()[0]), r"hidden is int64 \[3, 6\].*\[B, T, dim=8\]"),
        (lambda m: m.stage([1], False, False)(torch.zeros(2, 3, 4)), r"hidden is float32 \[2, 3, 4\]"),
        (lambda m: m.stage([1], True, False).loss(*batch()), "last=False: this stage has no head"),
        (lambda m: m.stage([0, 3], True, True), r"layers=\[0, 3\] are not layers of num_layers=3"),
        (lambda m: Transformer(CONFIG, layers=[1, 0]), r"layers=\[1, 0\] are not"),
        (lambda m: Transformer(CONFIG, layers=[-1]), r"layers=\[-1\] are not"),
        (
            lambda m: m.stage([1], False, False).stage([0], False, False),
            r"not within this model: layers 1, first=F",
        ),
        (lambda m: m.stage([1], False, False).stage([1], True, False), "not within this model"),
    ],
)
def test_misuse_is_refused_with_what_would_work(misuse, says):
    with pytest.raises(ValueError, match=says):
        misuse(Transformer(CONFIG))


def test_a_parallel_block_adds_attention_and_mlp_of_one_norm():
    config = ModelConfig(**SIZES, parallel_block=True)
    block = Block(config, layer=1, seed=3).double()
    initialize(block, config, seed=3, prefix="layers.1.")
    x, positions, sample_ids = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5), torch.arange(2)
    h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * block.attention_norm.weight
    hidden = torch.nn.functional.silu(h @ block.mlp.gate.weight.T) * (h @ block.mlp.up.weight.T)
    want = x + block.attention(h, positions) + hidden @ block.mlp.down.weight.T
    assert_equal_to(block(x, positions, sample_ids), want, what="y")
    assert "mlp_norm.weight" not in block.state_dict()
