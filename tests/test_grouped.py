"""Every strategy by NCCL's rules: a slice of what `make slow` runs whole with MINIPAR_TRANSPORT=grouped."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.train_config import VERIFY_DEFAULTS as DEFAULTS
from minipar.mesh import Mesh
from minipar.train.verification.verify import table, verify
from tests.comm.cases import cases, failures
from tests.examples import examples
from tests.strategies import mesh_sizes, num_ranks

EXPERTS = replace(DEFAULTS.model, num_experts=4, top_k=2, group_tokens=4)
MESHES = {
    "three axes, zero 1": dict(pp=2, dp=2, tp=2, zero=1, sequence_parallel=True, microbatches=2),
    "hybrid shards": dict(dp=4, zero=3, replicate=2),
    "interleaved, zero 3": dict(pp=2, dp=2, zero=3, schedule="interleaved", chunks=2, microbatches=2),
    "chunks behind products, zero bubble": dict(
        pp=2, tp=2, sequence_parallel=True, tp_chunked=True, microbatches=2, schedule="zb-v"
    ),
    "experts in two levels": dict(
        dp=4, ep=4, dispatch=("all-to-all", {"node_size": 2}), zero=2, model=EXPERTS
    ),
    "two attentions": dict(cp=4, cp_attention="usp", cp_ulysses=2),
    "zigzag ring": dict(dp=2, cp=2, cp_layout="zigzag"),
    "torch's own collectives": dict(dp=2, tp=2, algorithm="native"),
    "two levels of sums": dict(dp=4, algorithm="hierarchical"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_by_nccls_rules_gives_the_numbers_of_one_process(monkeypatch, name):
    monkeypatch.setenv("MINIPAR_TRANSPORT", "grouped")
    result = verify(DEFAULTS.choosing(steps=2, **MESHES[name]))
    assert result.equal, table(result)


AXES = ("pp", "dp", "cp", "tp", "ep", "edp")


@examples(3)
@given(sizes=mesh_sizes(max_ranks=6), data=st.data())
def test_collectives_on_all_mesh_axes_are_right_by_nccls_rules(sizes, data):
    calls = {size: data.draw(st.lists(cases(size), min_size=2, max_size=4)) for size in range(1, 7)}

    def wrong(world):
        mesh = Mesh(world, **sizes)
        return [failures(mesh.comm(axis), calls[mesh.sizes[axis]]) for axis in AXES]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIPAR_TRANSPORT", "grouped")
        found = minipar.run(wrong, world_size=num_ranks(sizes))
    assert found == [[[] for _ in AXES] for _ in found]
