"""Bugs that people ship, planted one at a time: the comparison with one process sees each of them."""

import pytest
import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.learn.museum import mesh_faults
from minipar.mesh import placement_of
from minipar.model import Transformer
from minipar.tensor_parallel import column, sequence, tensor_parallel
from minipar.tensor_parallel import parallel_linear as linear
from tests.tensor_parallel.programs import compare_outputs, cut
from tests.tensor_parallel.strategies import Case

CONFIG = ModelConfig(
    vocab_size=8, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=16, dropout=0.2,
    head_dim=6, qkv_bias=True, qk_norm=True,
)  # fmt: skip


def case(sequence_parallel: bool, tp: int = 2) -> Case:
    return Case(CONFIG, tp, sequence_parallel, batch=2, length=4, seed=5)


def shared_heads_not_summed(world):
    sharded_weight = linear.ColumnParallelLinear.sharded_weight
    linear.ColumnParallelLinear.sharded_weight = lambda self: sharded_weight(self)._replace(replicas=None)
    return False


def shared_biases_not_summed(world):
    linear.ColumnParallelLinear.add_bias = lambda self, y: y if self.bias is None else y + self.bias
    return False


def dropout_by_local_position(world):
    def local(self, x, site, positions, *args):
        return self.dropout(x, site, positions.narrow(-1, 0, x.shape[1]), *args)

    sequence.SequenceParallelDropout.__call__ = local
    return True


def of_the_museum(fault, sequence_parallel: bool):
    def planted(world):
        fault(world, setattr)
        return sequence_parallel

    planted.__name__ = fault.__name__
    return planted


FAULTS = [
    of_the_museum(mesh_faults.norm_gradients_not_summed, True),
    of_the_museum(mesh_faults.norm_gradients_not_summed, False),  # those of the norms of queries and keys
    of_the_museum(mesh_faults.outputs_added, False),
    of_the_museum(mesh_faults.dx_not_summed, False),
    of_the_museum(mesh_faults.in_place_backward, False),
    shared_heads_not_summed,
    shared_biases_not_summed,
    dropout_by_local_position,
]


def seen(world, fault) -> str:
    """What the comparison says with the fault in; the run's modules are put back, as ranks outlive a call."""
    kept = [(owner, dict(vars(owner))) for owner in (column, linear, sequence)]
    classes = [(c, dict(vars(c))) for c in (linear.ColumnParallelLinear, sequence.SequenceParallelDropout)]
    try:
        compare_outputs(world, case(fault(world), world.size))
        return "nothing"
    except AssertionError as error:
        return str(error)
    finally:
        for owner, names in kept:
            vars(owner).update(names)
        for owner, names in classes:
            for name in ("sharded_weight", "add_bias", "__call__"):
                if name in names:
                    setattr(owner, name, names[name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_bug_is_seen(fault):
    said = minipar.run(seen, fault, world_size=4)
    assert any("max|a - b|" in line or "shape" in line for line in said), said


def test_without_a_bug_nothing_is_seen():
    for sequence_parallel in (False, True):
        assert minipar.run(seen, lambda world, sp=sequence_parallel: sp, world_size=4) == ["nothing"] * 4


def initial(world, how: str) -> str:
    """Initialise shards the wrong way, and hold them to what one process starts from."""
    oracle = dict(case(False).model().named_parameters())
    model = cut(case(False), world)
    torch.manual_seed(0)
    for parameter in model.parameters():
        placement = placement_of(parameter)
        if how == "one seed":
            shape, scale = parameter.shape, 0.02
        else:  # the fan-in of the shard
            shape, scale = parameter.shape, parameter.shape[-1] ** -0.5
        if parameter.dim() == 2 and placement.length != placement.global_shape:
            parameter.data = torch.randn(shape, dtype=torch.float64) * scale
    weight = model.layers["0"].attention.o.weight
    columns = world.all_gather(weight.detach().t().contiguous()).chunk(world.size)
    if how == "one seed" and torch.equal(columns[0], columns[-1]):
        return "equal shards"
    ratio = weight.std() * oracle["layers.0.attention.o.weight"].shape[1] ** 0.5
    return f"{ratio:.1f}"


def test_shards_from_one_seed_are_copies_and_are_noticed():
    assert minipar.run(initial, "one seed", world_size=4) == ["equal shards"] * 4


def ours(world) -> bool:
    model = tensor_parallel(Transformer(CONFIG, seed=1), world)
    weight = model.layers["0"].attention.o.weight.detach().t().contiguous()
    columns = world.all_gather(weight).chunk(world.size)
    return not any(torch.equal(columns[0], other) for other in columns[1:])


def test_our_shards_are_parts_of_one_initial_weight():
    assert all(minipar.run(ours, world_size=4))


def test_a_shard_s_own_fan_in_makes_weights_sqrt_tp_too_large():
    for ratio in minipar.run(initial, "fan-in", world_size=4):
        assert 1.7 < float(ratio) < 2.3
