"""Latent attention over tp ranks: one process's numbers, the bytes of the formula, and planted faults that are seen."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.mesh import placement_of
from minipar.model import WeightGradients, defer_weight_gradients
from minipar.model.norm import RMSNorm
from minipar.tensor_parallel import sequence, split_model
from tests.examples import examples
from tests.tensor_parallel.programs import compare_outputs, cut
from tests.tensor_parallel.strategies import Case, cases

CONFIG = ModelConfig(
    vocab_size=8, dim=16, num_layers=2, num_heads=4, hidden_dim=16, dropout=0.2, kv_latent_dim=6, rope_dim=2
)


def case(sequence_parallel: bool, **changes) -> Case:
    return Case(replace(CONFIG, **changes), 2, sequence_parallel, batch=2, length=4, seed=5, algorithm="ring")


@examples(12)
@given(cases(latent=st.just(True)))
def test_logits_loss_and_all_gradients_are_those_of_one_process(case):
    minipar.run(compare_outputs, case, world_size=case.tp)


def bytes_of_step_and_placements(world, case: Case) -> tuple[int, dict[str, tuple[int, ...]]]:
    model = cut(case, world)
    comm = model.overrides.output.comm
    before = comm.traffic.sent_bytes
    model.loss(*case.tokens()).backward()
    attention = model.layers["0"].attention
    shapes = {name: tuple(placement_of(p).length) for name, p in attention.named_parameters()}
    if case.config.kv_latent_dim:
        assert attention.k_up.out_features == len(attention.k_up.weight)
    return comm.traffic.sent_bytes - before, shapes


@pytest.mark.parametrize("parallel_block", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_latent_is_whole_on_every_rank_and_costs_one_more_sum(sequence_parallel, parallel_block):
    """Beside those of other attention: the sum of B T (c + r) elements a layer, and of the replicas' gradients."""
    latent = case(sequence_parallel, parallel_block=parallel_block)
    others = latent._replace(config=replace(latent.config, kv_latent_dim=0, rope_dim=None))
    (sent, shapes), _ = minipar.run(bytes_of_step_and_placements, latent, world_size=2)
    (without, _), _ = minipar.run(bytes_of_step_and_placements, others, world_size=2)
    (c, r, D), tokens = (6, 2, 16), 2 * 4
    elems = tokens * (c + r) + sequence_parallel * ((c + r) * D + c)
    assert sent - without == CONFIG.num_layers * 8 * elems  # 2 (tp - 1)/tp = 1 of each element, in float64
    assert shapes == {
        "q.weight": (2 * (4 + r), D),
        "kv_down.weight": (c, D),
        "kv_norm.weight": (c,),
        "k_rope.weight": (r, D),
        "k_up.weight": (2 * 4, c),
        "v_up.weight": (2 * 4, c),
        "o.weight": (D, 2 * 4),
    }


# Planted faults: each returns whether it needs sequence parallelism ---------------------------------------------------


def latents_not_summed(patch):
    patch.setattr(split_model, "shared_latents", lambda attention, plan, x: (attention.latents(x),))
    return False


def replica_not_summed(patch):
    patch.setattr(split_model, "SequenceParallelLinear", lambda linear, comm: linear)
    return True


def norm_not_summed(patch):
    patch.setattr(sequence.SequenceParallelRMSNorm, "forward", RMSNorm.forward)
    return True


def latents_differ_by_rank(patch):
    shared = split_model.shared_latents
    patch.setattr(
        split_model,
        "shared_latents",
        lambda attention, plan, x: (shared(attention, plan, x)[0] * (1 + plan.comm.rank),),
    )
    return False


FAULTS = [latents_not_summed, replica_not_summed, norm_not_summed, latents_differ_by_rank]


def seen(world, fault) -> str:
    """What the comparison says with the fault in; it is taken out again, as ranks outlive a call."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            compare_outputs(world, case(fault(patch)))
            return "nothing"
        except AssertionError as error:
            return str(error)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_seen(fault):
    said = minipar.run(seen, fault, world_size=2)
    assert any("max|a - b|" in line for line in said), said


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_without_a_fault_nothing_is_seen(sequence_parallel):
    assert minipar.run(seen, lambda patch: sequence_parallel, world_size=2) == ["nothing"] * 2


def deferred_gradients_differ(world, case: Case) -> float:
    model, whole = cut(case, world), cut(case, world)
    queue = WeightGradients()
    defer_weight_gradients(model, queue)
    for m in (model, whole):
        m.loss(*case.tokens()).backward()
    queue.run()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_deferred_weight_gradients_are_the_same_bits(sequence_parallel):
    assert minipar.run(deferred_gradients_differ, case(sequence_parallel), world_size=2) == [0.0, 0.0]


def test_no_gradient_is_missing():
    model = case(False).model()
    model.loss(*case(False).tokens()).backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_matrix_of_the_sequences_own_tokens_is_shown_like_any_other():
    assert "bias=False" in repr(sequence.SequenceParallelLinear(torch.nn.Linear(2, 3, bias=False), comm=None))
