"""The scripts for a judge: right ones have the losses of one process, and each mistake shows, as its table says it does."""

import math
import re

import pytest
import torch

import minipar
from minipar.mesh import Mesh
from tests.strategies import assert_equal_to
from tests.train.verification.scripts import MODULES, RIGHT, WRONG

STEPS = 4


def losses(world, setup, sizes):
    _, _, step = setup(world, Mesh(1 if world is None else world, **sizes))
    return torch.stack([step(k) for k in range(STEPS)])


def losses_of_all(world, named):
    """The losses of each script, or the error that it raised on this rank."""
    scripts = RIGHT | {wrong.name: (wrong.setup, wrong.sizes) for wrong in WRONG.values()}
    found = {}
    for name in named:
        setup, sizes = scripts[name]
        try:
            found[name] = losses(world, setup, sizes)
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def on_ranks(scripts: dict[str, dict[str, int]]) -> dict[str, list]:
    """Return name -> what each rank got, of scripts with their meshes. Pools are of the mesh's size: see base.py."""
    found = {}
    for size in (2, 4):
        names = [name for name, sizes in scripts.items() if math.prod(sizes.values()) == size]
        if names:
            minipar.shutdown()
            of_ranks = minipar.run(losses_of_all, names, world_size=size)
            found |= {name: [of_rank[name] for of_rank in of_ranks] for name in names}
    return found


def each_module(test):
    """Run a test on the scripts of each module: quick runs judge some of them, in own_training."""
    names = [module.__name__.rpartition(".")[2] for module in MODULES]
    return pytest.mark.thorough(pytest.mark.parametrize("module", MODULES, ids=names)(test))


@each_module
def test_right_scripts_have_the_losses_of_one_process(module):
    found = on_ranks({name: sizes for name, (_, sizes) in module.RIGHT.items()})
    for name, (setup, _) in module.RIGHT.items():
        want = losses(None, setup, {})
        for rank, got in enumerate(found[name]):
            assert not isinstance(got, str), f"{name}: {got}"
            assert_equal_to(got, want, what=f"{name} on rank {rank}")


@each_module
def test_each_mistake_shows_as_the_table_says(module):
    found = on_ranks({wrong.name: wrong.sizes for wrong in module.WRONG})
    assert [said for wrong in module.WRONG if (said := unlike_the_table(wrong, found[wrong.name]))] == []


def unlike_the_table(wrong, of_ranks) -> str:
    """Return what is not as the table says of a wrong script, "" if nothing."""
    want = losses(None, wrong.setup, {})
    for got in of_ranks:
        if isinstance(got, str) or wrong.raises:
            if not isinstance(got, str) or not wrong.raises or wrong.raises not in got:
                return f"{wrong.name}: {got}"
        elif bool(((got - want).abs() > 1e-6 * want.abs()).any()) == wrong.hidden:
            return f"{wrong.name}: {got} for {want}"
    return ""


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_mistake_says_what_it_is_and_what_to_name(wrong):
    """A word with a dot is (a part of) the name of a parameter or a buffer of the one-process model."""
    model, _, _ = wrong.setup(None, Mesh(1))
    assert wrong.says.endswith(".")
    assert wrong.names
    for word in wrong.names:
        if re.search(r"\.[a-z]", word):
            assert any(word in name for name in model.state_dict()), word
