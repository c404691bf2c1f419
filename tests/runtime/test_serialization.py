"""Results travel compact, and arrive as what they were."""

import inspect
import traceback

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.mesh import Placement
from minipar.runtime.serialization import dumps, loads
from tests.strategies import dtypes, shapes


def test_a_view_of_a_large_storage_travels_as_its_own_elements():
    large = torch.arange(1_000_000)
    for view in (
        large[:3],
        large[::250_000],
        large.view(1000, 1000)[5, :4],
        large.view(1000, 1000).T[2:3, :3],
    ):
        packed = dumps({"result": view})
        assert len(packed) < 2000
        assert torch.equal(loads(packed)["result"], view)


def test_a_compacted_parameter_is_still_one_and_keeps_what_it_carries():
    """Broken on purpose by dropping what is in __dict__, the placement would be lost."""
    flat = torch.randn(1000)
    shard = torch.nn.Parameter(flat[10:14], requires_grad=False)
    shard.placement = Placement.whole("weight", (4,))
    again = loads(dumps(shard))
    assert type(again) is torch.nn.Parameter
    assert not again.requires_grad
    assert torch.equal(again, shard)
    assert again.placement == shard.placement


def test_a_whole_parameter_keeps_what_it_carries():
    weight = torch.nn.Parameter(torch.randn(4))
    weight.placement = Placement.whole("weight", (4,))
    again = loads(dumps(weight))
    assert again.requires_grad
    assert again.placement == weight.placement


def test_a_module_with_a_tied_parameter_stays_tied():
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    again = loads(dumps(model))
    assert again["head"].weight is again["embed"].weight


def test_the_caller_cannot_be_changed_through_a_result():
    kept = torch.zeros(3)
    result = loads(dumps(kept))
    result += 1
    assert kept.tolist() == [0, 0, 0]


@given(shapes(), dtypes, st.booleans(), st.booleans())
def test_every_tensor_arrives_as_it_was(shape, dtype, transposed, large_storage):
    whole = torch.arange(2 * torch.Size(shape).numel() + 5).to(dtype)
    start = 3 if large_storage else 0
    x = whole[start : start + torch.Size(shape).numel()]
    x = (x if large_storage else x.clone()).view(shape)
    x = x.T if transposed and x.dim() == 2 else x
    again = loads(dumps(x))
    assert (again.dtype, again.shape, again.requires_grad) == (x.dtype, x.shape, False)
    assert torch.equal(again, x)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_tensor_arrives_as_it_was(form):
    x = getattr(torch.eye(3), form)()
    again = loads(dumps(x))
    assert again.layout == x.layout
    assert torch.equal(again.to_dense(), torch.eye(3))


def test_a_view_of_a_tensor_without_data_arrives_as_it_was():
    x = torch.empty(4, device="meta")[:2]
    again = loads(dumps(x))
    assert (again.device, again.shape, again.dtype) == (x.device, x.shape, x.dtype)


@pytest.mark.parametrize("grad", [False, True])
def test_whether_a_view_requires_grad_arrives_too(grad):
    x = torch.zeros(10, requires_grad=grad)[:2]
    assert loads(dumps(x)).requires_grad is grad


def test_ranks_return_tensors_models_and_nothing():
    def results(world):
        return torch.arange(1000)[world.rank :: 500], torch.nn.Linear(2, 1), None

    for rank, (x, linear, nothing) in enumerate(minipar.run(results, world_size=2)):
        assert x.tolist() == [rank, 500 + rank]
        assert linear(torch.ones(2)).shape == (1,)
        assert nothing is None


def of_a_notebook():
    names = {"__name__": "__main__"}
    exec(compile("\ndef ends():\n    raise KeyError", "/tmp/ipykernel_1/23.py", "exec"), names)
    return names["ends"]


def test_what_travels_keeps_its_file_line_and_source():
    """cloudpickle 3.1.3 writes "<dynamic-code>" in place of the file, and the line's text is lost with it."""

    class Ends:
        def method(self):
            raise KeyError

        def __call__(self):
            def nested():
                raise KeyError

            nested()

    def fails():
        raise KeyError

    missing = lambda: {}[2]  # noqa: E731
    functions = (fails, missing, Ends().method, Ends(), of_a_notebook())

    def work(world):
        seen = []
        for function in functions:
            try:
                function()
            except KeyError as error:
                seen.append(tuple(traceback.extract_tb(error.__traceback__)[-1]))
        return seen, inspect.getsource(fails), inspect.getsource(Ends.method)

    first = inspect.getsourcelines(Ends.method)[1]
    expected = [
        (__file__, inspect.getsourcelines(fails)[1] + 1, "fails", "raise KeyError"),
        (__file__, inspect.getsourcelines(missing)[1], "<lambda>", inspect.getsource(missing).strip()),
        (__file__, first + 1, "method", "raise KeyError"),
        (__file__, first + 5, "nested", "raise KeyError"),
        ("/tmp/ipykernel_1/23.py", 3, "ends", ""),
    ]
    sources = inspect.getsource(fails), inspect.getsource(Ends.method)
    assert minipar.run(work, world_size=1) == [(expected, *sources)]
