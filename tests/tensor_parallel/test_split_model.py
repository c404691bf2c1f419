"""The model cut over tp ranks is the model of one process: logits, loss, gradients, steps, and back to the whole."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import minipar
from minipar.config.mesh_rules import check_tensor_parallel
from minipar.config.model_config import ModelConfig
from minipar.data_parallel import DDP, ZeroOptimizer
from minipar.mesh import place_whole, placement_of
from minipar.model import Transformer, WeightGradients, defer_weight_gradients
from minipar.tensor_parallel import full_state_dict, tensor_parallel
from tests.examples import examples
from tests.strategies import assert_equal_to
from tests.tensor_parallel.programs import assert_gradients_equal, compare_outputs, cut
from tests.tensor_parallel.strategies import Case, cases

TINY = ModelConfig(vocab_size=8, dim=8, num_layers=1, num_heads=4, num_kv_heads=4, hidden_dim=8)


@given(cases())
def test_logits_loss_and_all_gradients_are_those_of_one_process(case):
    minipar.run(compare_outputs, case, world_size=case.tp)


@examples(8)
@given(cases(), st.integers(1, 3), st.sampled_from([0, 8]))
@example(Case(TINY, tp=2, sequence_parallel=False, batch=2, length=4, seed=5), 2, 8)
def test_a_mixture_of_experts_is_cut_too(case, num_experts, shared):
    config = replace(
        case.config,
        num_experts=num_experts,
        top_k=min(2, num_experts),
        moe_every=1,
        shared_dim=shared * case.tp,
    )
    minipar.run(compare_outputs, case._replace(config=config), world_size=case.tp)


def equal_tokens(world, options: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of samples of one token each, as in a text's blank lines, by the split model and by one process."""
    pairs = []
    for seed in range(6):
        config = replace(
            TINY, dim=32, num_layers=2, hidden_dim=16, num_experts=4, moe_every=1, group_tokens=8
        )
        config = replace(config, capacity_factor=1.0, **options)
        case = Case(config, world.size, False, batch=2, length=16, seed=seed)
        tokens = torch.tensor([1, 5])[:, None].expand(2, 16)
        pairs.append((cut(case, world)(tokens).detach(), case.model()(tokens).detach()))
    return pairs


@pytest.mark.parametrize(
    "options", [dict(router="expert_choice"), dict(drop_order="weight", top_k=2)], ids=str
)
def test_runs_of_equal_tokens_are_routed_as_in_one_process(options):
    """Equal tokens have equal scores but for rounding, which differs between meshes: positions decide, not rounding."""
    for pairs in minipar.run(equal_tokens, options, world_size=2):
        for found, want in pairs:
            assert_equal_to(found, want, what="logits")


def gradients_of_logits(world, case: Case) -> None:
    model, oracle = cut(case, world), case.model()
    tokens, _ = case.tokens()
    for m in (model, oracle):
        m(tokens).square().sum().backward()
    assert_gradients_equal(model, oracle)


@examples(6)
@given(cases())
def test_gathered_logits_carry_gradients_too(case):
    minipar.run(gradients_of_logits, case, world_size=case.tp)


def train(model, case: Case, optimizer_cls, **kwargs):
    optimizer = optimizer_cls(model.parameters(), **kwargs)
    losses = []
    for step in range(5):
        for microbatch in range(2):
            tokens, targets = case.tokens(10 * step + microbatch)
            loss = model.loss(tokens, targets, step=step)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return torch.stack(losses)


def compare_training(world, case: Case, optimizer_cls, kwargs) -> None:
    model, oracle = cut(case, world), case.model()
    losses, want = (train(m, case, optimizer_cls, **kwargs) for m in (model, oracle))
    assert_equal_to(losses, want, what="losses")
    state = full_state_dict(model, world)
    for name, value in oracle.state_dict().items():
        assert_equal_to(state[name], value, what=name)


OPTIMIZERS = st.sampled_from(
    [(torch.optim.SGD, dict(lr=0.1, momentum=0.9)), (torch.optim.AdamW, dict(lr=1e-2, eps=1e-3))]
)


@examples(10)
@given(cases(), OPTIMIZERS)
def test_five_steps_of_accumulation_match_one_process(case, optimizer):
    minipar.run(compare_training, case, *optimizer, world_size=case.tp)


def compare_states(world, case: Case) -> None:
    model, oracle = cut(case, world), case.model()
    state, want = full_state_dict(model, world), oracle.state_dict()
    assert list(state) == list(want)
    assert all(torch.equal(state[name], want[name]) for name in want)
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        assert placement.name == name
        assert torch.equal(parameter, placement.slice_of(want[name]))
        assert parameter.untyped_storage().nbytes() == parameter.nbytes  # nothing of the whole is kept alive


@given(cases())
def test_the_full_state_dict_is_that_of_the_uncut_model(case):
    minipar.run(compare_states, case, world_size=case.tp)


def compare_stages(world, case: Case) -> None:
    """Two stages, one after the other; between them, hidden states as the stages pass them on."""
    last_layer = case.config.num_layers - 1
    first = cut(case, world, layers=range(last_layer), last=False)
    last = cut(case, world, layers=[last_layer], first=False)
    oracle = case.model()
    tokens, targets = case.tokens()
    hidden = first(tokens, step=3)
    tokens_here = case.length // (case.tp if case.sequence_parallel else 1)
    assert hidden.shape == (case.batch, tokens_here, case.config.dim)
    loss = last.loss(hidden, targets, step=3)
    want = oracle.loss(tokens, targets, step=3)
    assert_equal_to(loss, want, what="loss")
    loss.backward()
    want.backward()
    if case.config.tie_embeddings:
        placement = placement_of(last.head.weight)
        assert placement.tied_to == "embedding.weight"
        total = first.embedding.weight.grad + last.head.weight.grad
        assert_equal_to(total, placement.slice_of(oracle.embedding.weight.grad), what="tied embedding")
    tied = {first.embedding.weight, last.head.weight} if case.config.tie_embeddings else set()
    assert_gradients_equal(first, oracle, but=tied)
    assert_gradients_equal(last, oracle, but=tied)


@examples(12)
@given(cases())
def test_stages_pass_on_hidden_states_or_their_shards(case):
    minipar.run(compare_stages, case, world_size=case.tp)


def compare_deferred(world, case: Case) -> None:
    whole, halves = cut(case, world), cut(case, world)
    tokens, targets = case.tokens()
    whole.loss(tokens, targets).backward()
    queue = WeightGradients()
    defer_weight_gradients(halves, queue)
    halves.loss(tokens, targets).backward()
    # In pieces, the matrices of one input share a round, and so an entry; the tied head is not in pieces.
    matrices = (3 if case.config.parallel_block else 4) if case.chunked else 7
    if (
        case.config.kv_latent_dim
    ):  # k_up and v_up in any case; kv_down and k_rope unless their gradients are summed over tp
        matrices += 2 * case.chunked + 2 * (not case.sequence_parallel)
    assert len(queue) == matrices * case.config.num_layers + 1
    assert halves.layers["0"].mlp.gate.weight.grad is None
    queue.run()
    for (name, a), (_, b) in zip(whole.named_parameters(), halves.named_parameters()):
        tied = case.config.tie_embeddings and name == "embedding.weight"  # added in another order
        if tied:
            assert_equal_to(a.grad, b.grad, what=name)
        else:
            assert torch.equal(a.grad, b.grad), name


@examples(12)
@given(cases())
def test_deferred_weight_gradients_are_the_same_bits(case):
    minipar.run(compare_deferred, case, world_size=case.tp)


def padded(world, vocab_size: int, sequence_parallel: bool) -> None:
    config = ModelConfig(vocab_size=vocab_size, dim=8, num_layers=1, num_heads=4, hidden_dim=8)
    case = Case(config, world.size, sequence_parallel, batch=2, length=8, seed=vocab_size)
    model, oracle = case.model(), case.model()
    with warnings.catch_warnings(record=True, action="always") as said:
        tensor_parallel(model, world, sequence_parallel, pad_vocab=True)
    says = f"vocab_size={vocab_size} is cut over tp=4 as if padded to {(vocab_size + 3) // 4 * 4}"
    told = world.rank == 0 and vocab_size % world.size != 0
    assert [str(warning.message) for warning in said] == [says] * told
    tokens, targets = case.tokens()
    assert_equal_to(model(tokens), oracle(tokens), what="logits")
    for m in (model, oracle):
        m.loss(tokens, targets).backward()
    assert_gradients_equal(model, oracle)
    assert torch.equal(full_state_dict(model, world)["head.weight"], oracle.head.weight)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vocab_size", [7, 10, 12])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_padded_vocabulary_gives_the_unpadded_numbers(vocab_size, sequence_parallel):
    minipar.run(padded, vocab_size, sequence_parallel, world_size=4)


def frozen(world) -> None:
    case = Case(TINY, world.size, True, 1, 4, seed=0)
    model = case.model()
    model.embedding.weight.requires_grad_(False)
    model.layers["0"].attention.k.weight.requires_grad_(False)
    tensor_parallel(model, world, sequence_parallel=True)
    model.loss(*case.tokens()).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {"embedding.weight", "layers.0.attention.k.weight"}


def test_a_frozen_parameter_stays_frozen_and_gets_no_gradient():
    minipar.run(frozen, world_size=2)


def on_meta(world) -> list:
    model = Transformer(TINY, device="meta")
    tensor_parallel(model, world)
    return [(name, p.is_meta, tuple(p.shape)) for name, p in model.named_parameters()]


def test_a_model_without_storage_is_cut_without_storage():
    for name, is_meta, shape in minipar.run(on_meta, world_size=2)[1]:
        assert is_meta, name
        assert shape == (
            (8,) if "norm" in name else (8, 4) if name.endswith(("o.weight", "down.weight")) else (4, 8)
        )


SIZES = dict(vocab_size=24, dim=48, num_heads=12, num_kv_heads=6, hidden_dim=24)


@pytest.mark.parametrize(
    ("change", "tp", "line"),
    [
        ({}, 5, "tp=5 does not divide num_heads=12; use 1, 2, 3, 6 or 12"),
        ({}, 4, "tp=4 neither divides num_kv_heads=6 nor is a multiple of it; use 1, 2, 3, 6 or 12"),
        ({"hidden_dim": 16}, 3, "tp=3 does not divide hidden_dim=16; use 1 or 2"),
        ({"vocab_size": 22}, 3, "tp=3 does not divide vocab_size=22; use 1 or 2, or pad_vocab=True"),
        ({}, 0, "tp=0 does not divide num_heads=12; use 1, 2, 3, 6 or 12"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_line_that_says_what_can(change, tp, line):
    with pytest.raises(ValueError) as error:
        check_tensor_parallel(ModelConfig(**SIZES | change), tp)
    assert str(error.value) == line


def test_a_vocabulary_too_small_to_pad_is_refused():
    config = ModelConfig(**SIZES | {"vocab_size": 7})
    with pytest.raises(ValueError, match="tp=6 leaves a rank without a row of vocab_size=7; use 1, 2 or 3"):
        check_tensor_parallel(config, 6, pad_vocab=True)


def refused(world) -> list[str]:
    model = Transformer(replace(TINY, dim=6, num_heads=3, num_kv_heads=3, hidden_dim=6))
    before = {name: p.clone() for name, p in model.named_parameters()}
    errors = []
    for attempt in (
        lambda: tensor_parallel(model, world),
        lambda: tensor_parallel(Transformer(TINY), world, sequence_parallel=True).loss(
            *torch.zeros(2, 1, 7, dtype=torch.int64)
        ),
    ):
        with pytest.raises(ValueError) as error:
            attempt()
        errors.append(str(error.value))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    return errors


def test_a_refusal_changes_nothing():
    first, second = minipar.run(refused, world_size=2)[0]
    assert first == "tp=2 does not divide num_heads=3; use 1"
    assert second == "tp=2 does not divide the tokens of a sample=7; use 1 or 7"


def unknown_layer(world) -> None:
    model = Transformer(replace(TINY, num_layers=2))
    before = {name: (type(m), m.weight.shape) for name, m in model.named_modules() if hasattr(m, "weight")}
    model.layers["1"].mlp = torch.nn.Identity()
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp is a Identity, for which there is no cut; use Attention"
    ):
        tensor_parallel(model, world)
    for name, module in model.named_modules():
        assert not hasattr(module, "weight") or before[name] == (type(module), module.weight.shape)
    assert all(block.attention.num_heads == TINY.num_heads for block in model.layers.values())


def test_a_layer_that_cannot_be_split_is_refused_before_any_other_is():
    minipar.run(unknown_layer, world_size=2)


def wrapped_first(world):
    for wrap in (DDP, lambda model, comm: ZeroOptimizer(model.parameters(), torch.optim.SGD, comm, lr=0.1)):
        model = Transformer(ModelConfig(vocab_size=16, dim=16, num_layers=1, num_heads=2, max_seq_len=8))
        place_whole(model)
        wrap(model, world)
        with pytest.raises(
            ValueError, match=r"embedding\.weight is in data parallelism already; cut over tp first"
        ):
            tensor_parallel(model, world)


def test_a_model_whose_replicas_sum_whole_gradients_is_not_cut():
    minipar.run(wrapped_first, world_size=2)
