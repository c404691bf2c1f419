import importlib

import pytest

import minipar


def warm_up(world) -> None:
    """What the tests' functions come with, imported while nobody waits for a message."""
    importlib.import_module("tests.tensor_parallel.strategies")


@pytest.fixture(scope="session", autouse=True)
def eight_ranks():
    """One pool for all: worlds of fewer ranks are a part of it, and it is not grown time and again."""
    minipar.run(warm_up, world_size=8)
