"""Every collective by every algorithm, on 1 to 8 real ranks, against the same computed in one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm import halving_doubling, hierarchical, reduction, ring, ring_with_root, tree
from tests.comm.cases import NAMES, case, cases, failures, implementation
from tests.examples import examples
from tests.strategies import seeds


def run_cases(size, drawn):
    """The cases on the first `size` ranks of a pool of 8, all in one run."""
    found = minipar.run(failures, drawn, world_size=size)
    assert not any(found), "\n".join(why for rank in found for why in rank)


@examples(40)
@given(st.data())
def test_every_algorithm_gives_the_result_computed_in_one_process(data):
    size = data.draw(st.integers(1, 8))
    run_cases(size, data.draw(st.lists(cases(size), min_size=12, max_size=20)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
def test_no_collective_and_algorithm_is_left_out(size):
    rows = [0, 1, size, 5 * size + 1]
    run_cases(size, [case(*name, (n, 2), torch.float64, root=size - 1) for name in NAMES for n in rows])


def test_the_root_is_rank_0_unless_told():
    def results(world):
        x = torch.tensor([world.rank + 1])
        places = (world, tree, ring_with_root)
        broadcasts = [of.broadcast(x) if of is world else of.broadcast(world, x) for of in places]
        reduces = [of.reduce(x) if of is world else of.reduce(world, x) for of in places]
        return [y if y is None else y.item() for y in (*broadcasts, *reduces)]

    assert minipar.run(results, world_size=3) == [[1] * 3 + [6] * 3] + [[1] * 3 + [None] * 3] * 2


def test_chunks_longer_than_a_segment_arrive_whole():
    rows = 3 * (reduction.SEGMENT_BYTES // 4) + 5
    names = [("all_reduce", "ring"), ("all_reduce", "doubling"), ("reduce_scatter", "ring")]
    run_cases(2, [case(*name, (rows,), torch.float32) for name in names])


@given(st.integers(2, 8), st.integers(0, 40), seeds)
@examples(15)
def test_all_reduce_gives_every_rank_the_same_bits(size, rows, seed):
    def results(world):
        x = torch.randn(rows, generator=torch.Generator().manual_seed(seed + world.rank))
        names = ["ring", "halving_doubling", "doubling", "tree", "double_tree", "hierarchical"]
        return [world.all_reduce(x, op, algorithm=name) for name in names for op in ("sum", "mean")]

    first, *others = minipar.run(results, world_size=size)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))


def test_a_result_can_be_put_where_the_caller_has_memory():
    def wrong(world):
        p, rank, bad = world.size, world.rank, []
        for algorithm in ("ring", "halving_doubling", "native"):
            x = torch.arange(3.0 * p)
            world.reduce_scatter(x, algorithm=algorithm, out=x[3 * rank : 3 * rank + 3])
            bad += (
                []
                if torch.equal(x[3 * rank :][:3], p * torch.arange(3.0 * p)[3 * rank :][:3])
                else [algorithm]
            )
            whole = torch.zeros(3 * p)
            whole[3 * rank : 3 * rank + 3] = torch.arange(3.0) + rank
            world.all_gather(whole[3 * rank : 3 * rank + 3], algorithm=algorithm, out=whole)
            want = torch.cat([torch.arange(3.0) + r for r in range(p)])
            bad += [] if torch.equal(whole, want) else [algorithm]
        for algorithm in ("tree", "ring", "native"):
            x = torch.arange(7.0) + rank
            world.broadcast(x, root=p - 1, algorithm=algorithm, out=x)
            bad += [] if torch.equal(x, torch.arange(7.0) + p - 1) else [algorithm]
        return bad

    for size in (1, 2, 5, 8):
        assert minipar.run(wrong, world_size=size) == [[]] * size


def signs_of_zeros(world):
    """Of the largest of 0 and -0, whose sign is that of one rank's: the sign by each algorithm."""
    x = torch.tensor([0.0, -0.0] if world.rank % 2 else [-0.0, 0.0])
    names = ["ring", "halving_doubling", "doubling", "tree"]
    return [
        world.all_reduce(x, op, algorithm=name).signbit().tolist() for name in names for op in ("max", "min")
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_same_zero(size):
    first, *others = minipar.run(signs_of_zeros, world_size=size)
    assert others == [first] * (size - 1)


def gathered_from_a_transposed_part(world, algorithm):
    """The whole, of which this rank's input is its own part, transposed."""
    whole = torch.zeros(2 * world.size, 2)
    mine = whole[2 * world.rank : 2 * world.rank + 2]
    mine.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    return world.all_gather(mine.t(), algorithm=algorithm, out=whole).tolist()


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_a_transposed_part_of_the_result_is_not_taken_for_the_part(algorithm):
    for whole in minipar.run(gathered_from_a_transposed_part, algorithm, world_size=2):
        assert whole == 2 * [[1.0, 3.0], [2.0, 4.0]]


def test_the_algorithms_are_plain_functions_of_a_comm():
    def results(world):
        x = torch.arange(5.0) + world.rank
        functions = [ring.all_reduce, halving_doubling.all_reduce, tree.all_reduce, hierarchical.all_reduce]
        return [function(world, x) for function in functions]

    for rank in minipar.run(results, world_size=4):
        assert all(torch.equal(y, 4 * torch.arange(5.0) + 6) for y in rank)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 30))
@examples(10)
def test_hierarchical_takes_any_node_size_that_divides(nodes, node_size, rows):
    nodes = nodes if nodes * node_size <= 8 else 1

    def total(world):
        return hierarchical.all_reduce(world, torch.arange(float(rows)), node_size=node_size)

    size = nodes * node_size
    for y in minipar.run(total, world_size=size):
        assert torch.equal(y, size * torch.arange(float(rows)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_result_requires_grad_whatever_the_input_does(size):
    """Differentiable collectives are those of minipar.comm.autograd; on a root, too, these are not."""

    def requiring(world):
        x = torch.ones(6, requires_grad=True)
        drawn = [case(*name, (6,), torch.float32) for name in NAMES]
        results = {(c.collective, c.algorithm): implementation(c)(world, x, *arguments(c)) for c in drawn}
        results["exchange with oneself"] = world.exchange(x, world.rank, x.shape, x.dtype, world.rank)
        results["tree.reduce"] = tree.reduce(world, x, op="mean")
        return [name for name, y in results.items() if y is not None and y.requires_grad]

    def arguments(case):
        return (case.root,) if case.collective == "broadcast" else ()

    assert minipar.run(requiring, world_size=size) == [[]] * size


@pytest.mark.parametrize("value", [torch.tensor([4e4, -4e4], dtype=torch.float16), torch.tensor([1 + 2j])])
def test_a_mean_of_float16_or_complex_numbers_is_right(value):
    """Two of these float16 numbers add up to infinity."""
    for mean in minipar.run(lambda world: world.all_reduce(value, "mean"), world_size=2):
        assert torch.equal(mean, value)


REFUSED = {
    "all_reduce: algorithm": (lambda w, x: w.all_reduce(x, algorithm="star"), "algorithm='star'.*ring"),
    "all_to_all: algorithm": (lambda w, x: w.all_to_all(x, algorithm="ring"), "algorithm='ring'.*pairwise"),
    "using": (lambda w, x: w.using("star"), "algorithm='star'.*ring"),
    "op": (lambda w, x: w.all_reduce(x, "prod"), "op='prod'.*sum, mean"),
    "mean of integers": (lambda w, x: w.all_reduce(x.long(), "mean"), "op='mean'.*int64.*sum"),
    "root": (lambda w, x: w.broadcast(x, root=2), "root=2.*0 to 1"),
    "root of reduce": (lambda w, x: w.reduce(x, root=-1), "root=-1.*0 to 1"),
    "sizes that do not add up": (lambda w, x: w.reduce_scatter(x, sizes=[2, 3]), r"sizes=\[2, 3\].*length 6"),
    "sizes too few": (lambda w, x: w.reduce_scatter(x, sizes=[6]), r"sizes=\[6\].*2 parts"),
    "negative sizes": (lambda w, x: w.reduce_scatter(x, sizes=[7, -1]), r"sizes=\[7, -1\]"),
    "sizes of a gather": (lambda w, x: w.all_gather(x, sizes=[1, 1]), r"sizes=\[1, 1\].*6"),
    "send_sizes": (lambda w, x: w.all_to_all(x, [1, 1], [1, 1]), r"send_sizes=\[1, 1\].*length 6"),
    "recv_sizes": (lambda w, x: w.all_to_all(x, [3, 3], [4, 4]), r"recv_sizes=\[4, 4\].*stays, 3"),
    "negative recv_sizes": (
        lambda w, x: w.all_to_all(x, [3, 3], [3 if r == w.rank else -1 for r in range(2)]),
        r"recv_sizes=\[.*-1.*stays, 3",
    ),
    "in place, not contiguous": (lambda w, x: w.all_reduce_(x.view(2, 3).t()), "contiguous.*strides"),
    "out of another shape": (lambda w, x: w.all_gather(x, out=torch.empty(11)), r"out is.*\(12,\)"),
    "a lazy out": (
        lambda w, x: w.broadcast(x, out=torch.complex(x, x).conj().imag),
        "out is a lazy conjugate or negative",
    ),
    "a lazy sum in place": (
        lambda w, x: w.all_reduce_(torch.complex(x, x).conj()),
        "out is a lazy conjugate",
    ),
    "an exchange into a transposed out": (
        lambda w, x: w.exchange(x, w.rank, None, None, w.rank, out=torch.empty(2, 3).t()),
        "out has the strides",
    ),
    "an exchange with itself of another shape": (
        lambda w, x: w.exchange(x[:1], w.rank, (3,), x.dtype, w.rank),
        r"exchange of \(1,\) with this rank itself into \(3,\)",
    ),
    "out of a broadcast": (lambda w, x: w.broadcast(x, out=torch.empty(5)), r"out is.*\(6,\)"),
    "out of another dtype": (lambda w, x: w.reduce_scatter(x, out=torch.empty(3).long()), "int64.*float32"),
    "no dim 0": (lambda w, x: w.all_gather(x[0]), r"dim 0.*view\(1\)"),
    "node_size": (
        lambda w, x: hierarchical.all_reduce(w, x, node_size=3),
        "node_size=3.*ranks=2; use 1 or 2",
    ),
    "to": (lambda w, x: w.send(x, 2), "rank.*2.*0 to 1"),
    "source": (lambda w, x: w.recv((6,), x.dtype, -1), "-1.*0 to 1"),
    "half with oneself": (lambda w, x: w.exchange(x, w.rank, x.shape, x.dtype, None), "to itself"),
    "subgroup without me": (lambda w, x: w.subgroup([1 - w.rank], "g"), "distinct ranks below 2"),
    "subgroup twice me": (lambda w, x: w.subgroup([w.rank, w.rank], "g"), "distinct ranks below 2"),
    "subgroup too large": (lambda w, x: w.subgroup([0, 1, 2], "g"), "distinct ranks below 2"),
}


def test_a_callers_mistake_is_a_value_error_that_names_both_numbers():
    def messages(world):
        said = {}
        for name, (call, _) in REFUSED.items():
            try:
                call(world, torch.zeros(6))
                said[name] = "nothing"
            except ValueError as error:
                said[name] = str(error)
        return said

    for said in minipar.run(messages, world_size=2):
        for name, (_, words) in REFUSED.items():
            with pytest.raises(ValueError, match=words):
                raise ValueError(said[name])
