"""Slices of a safetensors file are the slices of its tensors, and their bytes alone are read."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minipar.train.checkpoint import tensor_file
from minipar.train.checkpoint.tensor_file import Streamed, TensorFile, write_streamed
from tests.strategies import dtypes, shapes


@st.composite
def boxes(draw):
    shape = draw(shapes())
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, start, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, start))


@given(boxes(), st.integers(0, 5), dtypes)
def test_a_box_of_a_tensor_is_read_in_runs_of_its_own_bytes(tmp_path_factory, box, offset, dtype):
    shape, start, length = box
    path = tmp_path_factory.getbasetemp() / "slices.safetensors"
    flat = torch.randint(0, 100, (offset + torch.Size(shape).numel() + 2,)).to(dtype)
    save_file({"other": torch.ones(3), "x": flat}, path)
    seen = flat[offset:-2].view(shape)
    want = seen[tuple(slice(s, s + n) for s, n in zip(start, length))]
    got = TensorFile(path).read("x", shape, start, length, offset)
    assert got.dtype == dtype
    assert torch.equal(got, want)
    runs = list(tensor_file._runs(shape, start, length))
    assert sum(count for _, count in runs) == want.numel()
    ends = [first + count for first, count in runs]
    assert all(first > end for (first, _), end in zip(runs[1:], ends)), "two runs that could be one"


def test_streamed_files_are_readable_and_make_tensors_in_turn(tmp_path):
    tensors, made = (
        {"a": torch.randn(3, 4), "b": torch.ones((), dtype=torch.bfloat16), "c": torch.zeros(0, 2)},
        [],
    )
    with (tmp_path / "file").open("wb") as file:

        def make(name):
            made.append((name, file.tell()))
            return tensors[name]

        write_streamed(
            file,
            [Streamed(k, x.dtype, x.shape, lambda k=k: make(k)) for k, x in tensors.items()],
            {"by": "test"},
        )
    got = load_file(tmp_path / "file")
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    places = [at for _, at in made]
    assert places[0] % 8 == 0
    assert [at - places[0] for at in places] == [0, 48, 50]
