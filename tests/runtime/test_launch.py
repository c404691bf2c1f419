"""`run` from wherever a user calls it, the requests it refuses, and worlds that torchrun started."""

import faulthandler
import importlib
import math
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

import minipar
from minipar.comm import Comm
from minipar.comm.objects import broadcast_object
from minipar.runtime import launch
from minipar.runtime.forkserver import ForkServer
from minipar.runtime.pool import Pool
from tests import failures
from tests.programs import Program


def test_results_come_in_rank_order():
    assert minipar.run(lambda world: (world.rank, world.size), world_size=4) == [(r, 4) for r in range(4)]


def test_numbers_of_numpy_are_numbers():
    assert minipar.run(lambda world: world.size, world_size=np.int64(2), timeout_s=np.float32(9)) == [2, 2]


def test_the_longest_timeout_is_as_good_as_any():
    assert minipar.run(
        lambda world: world.all_reduce(torch.ones(1)).item(), world_size=2, timeout_s=launch.MAX_TIMEOUT_S
    ) == [2.0, 2.0]


def test_a_smaller_world_is_the_first_ranks_of_the_same_pool():
    pids = minipar.run(lambda world: os.getpid(), world_size=4)
    assert minipar.run(lambda world: os.getpid(), world_size=2) == pids[:2]
    total = minipar.run(lambda world: world.all_reduce(torch.ones(1)).item(), world_size=3)
    assert total == [3.0] * 3


def test_a_larger_world_gets_a_larger_pool():
    assert minipar.run(lambda world: world.size, world_size=6) == [6] * 6


def test_closures_lambdas_and_arguments_travel_by_value():
    weights = {"a": torch.arange(3.0)}

    def scaled(world, factor):
        return weights["a"] * factor + world.rank

    results = minipar.run(scaled, 10, world_size=2)
    assert [r.tolist() for r in results] == [[0, 10, 20], [1, 11, 21]]
    assert weights["a"].tolist() == [0, 1, 2]


def test_what_a_rank_reports_reaches_the_caller_in_its_order():
    heard = []

    def count(world):
        for step in range(3):
            world.report((step, torch.full((2,), world.rank)))

    minipar.run(count, world_size=2, on_report=lambda rank, value: heard.append((rank, value[0])))
    for rank in range(2):
        assert [step for r, step in heard if r == rank] == [0, 1, 2]


def test_an_exception_in_on_report_ends_only_that_run():
    def stop(rank, value):
        raise KeyError(value)

    with pytest.raises(KeyError):
        minipar.run(lambda world: world.report("news"), world_size=2, on_report=stop)
    assert minipar.run(lambda world: world.rank, world_size=2) == [0, 1]


def test_a_rank_asks_and_its_caller_answers():
    def ask(world):
        return [world.ask((world.rank, i)) for i in range(3)]

    answers = minipar.run(ask, world_size=2, on_ask=lambda rank, value: (rank, *value, "answer"))
    assert answers == [[(rank, rank, i, "answer") for i in range(3)] for rank in range(2)]
    assert minipar.run(ask, world_size=1) == [[None] * 3]


def test_threads_that_ask_at_the_same_time_get_their_own_answers():
    def ask(world):
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda k: [world.ask((k, i)) for i in range(300)], range(4)))

    (answers,) = minipar.run(ask, world_size=1, on_ask=lambda rank, value: value)
    assert answers == [[(k, i) for i in range(300)] for k in range(4)]


class Breaks:
    """What is pickled by the call of a function, and unpickled by that of another one: either may fail."""

    def __init__(self, pickle, unpickle, *args):
        self.pickle, self.unpickle, self.args = pickle, unpickle, args

    def __reduce__(self):
        self.pickle()
        return self.unpickle, self.args


CANNOT_LOAD = {
    ModuleNotFoundError: (importlib.import_module, "no_such_module"),
    FileNotFoundError: (os.listdir, "/no/such/folder"),
}
CANNOT_DUMP = partial(os.listdir, "/no/such/folder"), dict


def not_for_ever():
    """End this rank, should it still run in two minutes: a rank and its caller that wait for each other are a failure."""
    faulthandler.dump_traceback_later(120, exit=True)


@pytest.mark.parametrize("error", CANNOT_LOAD)
def test_an_unloadable_answer_raises_where_it_was_asked_for(error):
    def ask(world):
        not_for_ever()
        with pytest.raises(error):
            world.ask(1)
        faulthandler.cancel_dump_traceback_later()
        return world.ask(2)

    answers = {1: Breaks(dict, *CANNOT_LOAD[error]), 2: "fine"}
    assert minipar.run(ask, world_size=1, on_ask=lambda rank, value: answers[value]) == ["fine"]


@pytest.mark.parametrize("what", ["report", "ask"])
@pytest.mark.parametrize("error", CANNOT_LOAD)
def test_what_the_caller_cannot_load_raises_and_later_runs_work(error, what):
    how = CANNOT_LOAD[error]

    def tell(world):
        not_for_ever()
        getattr(world, what)(Breaks(dict, *how))

    with pytest.raises(error):
        minipar.run(tell, world_size=1)
    assert minipar.run(lambda world: world.ask(1), world_size=1, on_ask=lambda rank, value: value) == [1]


@pytest.mark.parametrize("what", ["report", "ask"])
def test_what_a_rank_cannot_pickle_raises_on_the_rank(what):
    def tell(world):
        not_for_ever()
        getattr(world, what)(Breaks(*CANNOT_DUMP))

    with pytest.raises(minipar.RankError, match="No such file or directory: '/no/such/folder'"):
        minipar.run(tell, world_size=1)


def test_an_answer_that_cannot_be_pickled_raises_in_the_caller():
    def ask(world):
        not_for_ever()
        world.ask(1)

    with pytest.raises(FileNotFoundError):
        minipar.run(ask, world_size=1, on_ask=lambda rank, value: Breaks(*CANNOT_DUMP))


def test_an_unloadable_result_does_not_hide_another_ranks_error():
    def fail(world):
        if world.rank == 0:
            return Breaks(dict, *CANNOT_LOAD[ModuleNotFoundError])
        if world.rank == 1:
            return "a result"
        time.sleep(1)  # most likely the others have returned then; the verdict is the same if they have not
        raise ValueError("the real cause")

    with pytest.raises(minipar.RankError, match="the real cause") as caught:
        minipar.run(fail, world_size=3)
    assert 0 not in caught.value.returned


def test_whoever_asks_outside_a_pool_is_told():
    elsewhere = SimpleNamespace(_transport=SimpleNamespace(ask=None))
    with pytest.raises(RuntimeError, match=r"ask was called outside minipar\.run"):
        Comm.ask(elsewhere, 1)


def test_an_object_is_broadcast_from_any_root():
    def spread(world):
        return [
            broadcast_object(world, {"from": world.rank, "long": "x" * 50 * root}, root) for root in (0, 1)
        ]

    want = [{"from": root, "long": "x" * 50 * root} for root in (0, 1)]
    assert minipar.run(spread, world_size=2) == [want, want]


@pytest.mark.thorough
def test_torch_compiles_script_definitions_around_graph_breaks(tmp_path):
    program = Program(
        tmp_path,
        """
        import minipar
        import torch

        class Net(torch.nn.Linear):
            def forward(self, x):
                return torch.relu(super().forward(x))

        def work(world):
            model = torch.compile(minipar.DDP(Net(4, 4), world), backend="eager")
            return bool(torch.isfinite(model(torch.ones(2, 4))).all())

        print(minipar.run(work, world_size=2))
        """,
    )
    status, out, err = program.finish()
    assert (status, out) == (0, "[True, True]\n"), err


@pytest.mark.thorough
def test_a_script_needs_no_main_guard_and_leaves_nothing_behind(tmp_path):
    program = Program(
        tmp_path,
        """
        import minipar

        class Answer:
            def __init__(self, rank):
                self.rank = rank

        def count(world):
            return Answer(world.rank)

        print("once")
        print(*(type(answer) is Answer and answer.rank for answer in minipar.run(count, world_size=2)))
        """,
    )
    status, out, err = program.finish()
    assert (status, out) == (0, "once\n0 1\n"), err
    assert program.leftovers() == []


@pytest.mark.thorough
def test_a_notebook_cell_runs_on_ranks_and_shows_their_prints():
    cells = [
        "import minipar, torch\nscale = 10",
        "def hello(world):\n    print('hello from', world.rank)\n    return scale * world.rank",
        "minipar.run(hello, world_size=2)",
        "scale = 20",
        "minipar.run(lambda world: hello(world), world_size=2)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    results = [[o.data["text/plain"] for o in cell.outputs if "data" in o] for cell in notebook.cells]
    assert "[rank 1] hello from 1" in shown[2]
    assert (results[2], results[4]) == (["[0, 10]"], ["[0, 20]"])


@pytest.mark.thorough
def test_under_torchrun_the_world_is_the_one_it_started(tmp_path):
    program = Program(
        tmp_path,
        """
        import torch, minipar
        from minipar import Comm
        world = minipar.init_from_env()
        again = Comm.from_process_group(None, timeout_s=30)
        total = world.all_reduce(torch.tensor([world.rank + 1.0])).item()
        same = again.all_reduce(torch.tensor([again.rank + 1.0]), algorithm="native").item()
        print(f"rank {world.rank} of {world.size}: {total} {same}\\n", end="", flush=True)
        """,
        launcher=(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--log-dir", str(tmp_path / "logs")),
        ),
    )
    status, out, err = program.finish()
    assert status == 0, err
    assert sorted(out.splitlines()) == ["rank 0 of 2: 3.0 3.0", "rank 1 of 2: 3.0 3.0"]


def test_outside_torchrun_init_from_env_names_what_is_missing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="^WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start .* torchrun"):
        minipar.init_from_env()


def test_import_minipar_loads_none_of_the_heavy_libraries(tmp_path):
    heavy = {
        "torch",
        "numpy",
        "matplotlib",
        "tyro",
        "IPython",
        "safetensors",
        "pandas",
        "hypothesis",
        "minipar.visualize",
    }
    program = Program(tmp_path, "import sys, minipar\nprint(*sys.modules)")
    _, out, _ = program.finish()
    assert "minipar" in out.split()
    assert not heavy & set(out.split())


# Requests that are refused before any process starts ---------------------------------------------------------------

BAD_REQUESTS = {
    "world_size=0 ": dict(world_size=0),
    "world_size=-1 ": dict(world_size=-1),
    "world_size=65 .* use 1 to 64": dict(world_size=65),
    "world_size=2.0 ": dict(world_size=2.0),
    "world_size='2' ": dict(world_size="2"),
    "world_size=True ": dict(world_size=True),
    "timeout_s=0 .* above 0": dict(world_size=2, timeout_s=0),
    "timeout_s='5' .* number of seconds": dict(world_size=2, timeout_s="5"),
    "timeout_s=None .* number of seconds": dict(world_size=2, timeout_s=None),
    "timeout_s=True .* number of seconds": dict(world_size=2, timeout_s=True),
    "timeout_s=nan .* above 0": dict(world_size=2, timeout_s=math.nan),
    "timeout_s=inf .* at most 31622400": dict(world_size=2, timeout_s=math.inf),
    "backend='mpi' .* gloo, nccl or auto": dict(world_size=2, backend="mpi"),
    "fn=3 cannot be called": dict(fn=3, world_size=2),
    "cannot travel .* pickle": dict(fn=threading.Lock().acquire, world_size=2),
}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_a_bad_request_is_refused_before_a_process_is_started(message, monkeypatch):
    def started(*args):
        raise AssertionError("a pool was started")

    monkeypatch.setattr(launch, "_pools", {})
    monkeypatch.setattr(launch, "Pool", started)
    with pytest.raises(ValueError, match=message):
        minipar.run(**{"fn": lambda world: None, **BAD_REQUESTS[message]})


def test_a_run_from_a_removed_folder_says_so_and_keeps_the_pool(tmp_path, monkeypatch):
    pids = minipar.run(lambda world: os.getpid(), world_size=1)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match="^the working folder of this process has been removed"):
        minipar.run(lambda world: None, world_size=1)
    os.chdir(tmp_path)
    assert minipar.run(lambda world: os.getpid(), world_size=1) == pids


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="nccl.* needs a GPU"):
        minipar.run(lambda world: None, world_size=1, backend="nccl")


def test_run_on_a_rank_and_run_inside_a_run_are_refused():
    def nested(world):
        minipar.run(lambda inner: None, world_size=1)

    with pytest.raises(minipar.RankError, match="run was called on a rank"):
        minipar.run(nested, world_size=1)

    def ask_again(rank, value):
        minipar.run(lambda world: None, world_size=1)

    with pytest.raises(ValueError, match="while another one is under way"):
        minipar.run(lambda world: world.report(1), world_size=1, on_report=ask_again)


@pytest.mark.parametrize(("told", "ranks"), [("8", 8), (None, 1)])
def test_ranks_per_node_is_what_torchrun_says(monkeypatch, told, ranks):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if told:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert launch.ranks_per_node() == ranks


def test_a_world_restarted_by_torchrun_reads_no_older_messages():
    store = torch.distributed.HashStore()

    def join(rank):
        return launch._of_this_life(store, rank, 3)

    store.set("minipar/2", "a rank that died before anyone answered")
    for life in ("first", "second"):
        with ThreadPoolExecutor(3) as ranks:
            views = list(ranks.map(join, range(3)))
        assert not any(view.check(["address"]) for view in views)
        views[0].set("address", life)
        assert [view.get("address").decode() for view in views] == [life] * 3


def test_shutdown_ends_the_pools_and_the_next_run_starts_one():
    pid = minipar.run(lambda world: os.getpid(), world_size=1)
    minipar.shutdown()
    minipar.shutdown()
    assert minipar.run(lambda world: os.getpid(), world_size=1) != pid


@pytest.fixture
def server():
    minipar.run(lambda world: None, world_size=1)
    return launch._servers[0]


def test_a_pool_whose_ranks_cannot_join_says_why(server):
    with pytest.raises(minipar.RankError, match="no-such-backend"):
        Pool(server, 1, "no-such-backend")


def test_a_pool_whose_processes_cannot_start_says_why(server, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match="processes of the pool cannot be started: .* No such file"):
        Pool(server, 1, "gloo")


@pytest.mark.thorough
def test_if_forking_is_unsafe_each_rank_is_its_own_interpreter(monkeypatch):
    launch._end_all()
    monkeypatch.setattr(launch, "ForkServer", partial(ForkServer, "exec"))
    try:
        assert minipar.run(lambda world: world.all_reduce(torch.ones(1)).item(), world_size=2) == [2.0, 2.0]
        with pytest.raises(minipar.RankError, match="KeyError"):
            minipar.run(failures.raises, world_size=2)
    finally:
        launch._end_all()
