import pytest

import minipar


@pytest.fixture(scope="session", autouse=True)
def eight_ranks():
    """One pool for all: worlds of fewer ranks are a part of it, and it is not grown time and again."""
    minipar.run(lambda world: None, world_size=8)
