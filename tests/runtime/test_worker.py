"""What a rank takes over from its caller, what it resets between two calls, and what it passes on."""

import importlib
import io
import os
import random
import re
import sys

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import minipar
from minipar.runtime import caller, worker


def test_an_earlier_functions_settings_change_no_later_results():
    def state(world):
        x = torch.ones(1, requires_grad=True)
        return (
            os.getpid(),
            str(torch.get_default_dtype()),
            str(torch.empty(0).device),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            (2 * x).requires_grad,
            torch.nn.Identity()(torch.ones(1)).item(),
            (torch.rand(1).item(), random.random(), np.random.rand()),
            os.environ.get("SPOILED"),
            os.getcwd(),
            "spoiled" in sys.path,
            world.trace is None,
            (torch.tensor([1e-40]) * 0.5).item(),
            torch.get_float32_matmul_precision(),
            (torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()),
            (torch.is_warn_always_enabled(), torch.utils.deterministic.fill_uninitialized_memory),
            (torch.backends.mkldnn.deterministic, torch.backends.cudnn.deterministic),
            (torch.backends.cudnn.enabled, torch.backends.cuda.math_sdp_enabled()),
            (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()),
            torch.backends.cuda.cudnn_sdp_enabled(),
            sys.stdout.fileno(),
        )

    def spoil(world):
        world.trace = minipar.support.trace.Trace()
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        register_module_forward_hook(lambda module, args, out: out + 1)
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        torch.set_flush_denormal(True)
        torch.set_float32_matmul_precision("medium")
        torch.backends.mkldnn.enabled = False
        torch.backends.cudnn.benchmark = True
        torch.autograd.set_detect_anomaly(True)
        torch.set_warn_always(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.mkldnn.deterministic = torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.enabled = False
        for enable in ("math", "flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{enable}_sdp")(False)
        sys.stdout = io.StringIO()
        os.environ["SPOILED"] = "yes"
        os.chdir("/")
        sys.path.append("spoiled")

    before = minipar.run(state, world_size=1)
    minipar.run(spoil, world_size=1)
    assert minipar.run(state, world_size=1) == before


SPOILS = {
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "all, bf16": lambda: setattr(torch.backends, "fp32_precision", "bf16"),
    "cudnn": lambda: setattr(torch.backends.cudnn, "fp32_precision", "ieee"),
    "cudnn.conv": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "cudnn, older": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "cuda": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "cuda, older": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "mkldnn": lambda: setattr(torch.backends.mkldnn, "fp32_precision", "bf16"),
    "mkldnn.matmul": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "products": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast's dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast on GPUs": lambda: torch.set_autocast_enabled("cuda", True),
    "autocast's cache": lambda: torch.set_autocast_cache_enabled(False),
    "fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
}


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="settings of newer versions of torch"
)
@pytest.mark.parametrize("spoil", SPOILS)
def test_precision_and_fast_path_settings_do_not_outlive_a_run(spoil):
    def state(world):
        backends = torch.backends
        of = [backends, backends.cudnn, backends.mkldnn, backends.cuda.matmul]
        of += [backends.cudnn.conv, backends.cudnn.rnn]
        of += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
        return (
            os.getpid(),
            [each.fp32_precision for each in of],
            (backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32, backends.mkldnn.allow_tf32),
            torch.get_float32_matmul_precision(),
            [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
            [str(torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")],
            torch.is_autocast_cache_enabled(),
            backends.mha.get_fastpath_enabled(),
        )

    def change(world, setting):
        before = state(world)
        setting()
        return before

    before = minipar.run(change, SPOILS[spoil], world_size=1)
    assert minipar.run(state, world_size=1) == before


def test_a_rank_takes_over_environment_folder_and_arguments(monkeypatch, tmp_path):
    monkeypatch.setenv("COLOUR", "blue")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])

    def here(world):
        return os.environ["COLOUR"], os.getcwd(), sys.argv[1:]

    assert minipar.run(here, world_size=2) == [("blue", str(tmp_path), ["--flag"])] * 2
    monkeypatch.delenv("COLOUR")
    assert minipar.run(lambda world: os.environ.get("COLOUR"), world_size=1) == [None]


def test_what_ranks_print_appears_at_the_caller_with_the_rank(capsys):
    def say(world):
        print("one\ntwo", world.rank)
        print("no newline", end="")
        print("trouble", file=sys.stderr)

    minipar.run(say, world_size=2)
    shown = capsys.readouterr()
    for rank in range(2):
        lines = [line for line in shown.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines == [f"[rank {rank}] {text}" for text in ("one", f"two {rank}", "no newline")]
        assert f"[rank {rank}] trouble" in shown.err.splitlines()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_function_that_closes_stdout_or_stderr_still_returns(stream, closed, capfd):
    def leave(world):
        getattr(sys, stream).close() if closed else setattr(sys, stream, None)
        return 7

    def say(world):
        print("again", file=getattr(sys, stream))

    assert minipar.run(leave, world_size=1) == [7]
    minipar.run(say, world_size=1)
    assert "[rank 0] again\n" in capfd.readouterr()


def test_what_a_failing_rank_printed_appears_before_its_error(capsys):
    def fail(world):
        print("last words", end="")
        raise KeyError

    with pytest.raises(minipar.RankError):
        minipar.run(fail, world_size=1)
    assert capsys.readouterr().out == "[rank 0] last words\n"


def test_an_asynchronous_failure_that_nobody_awaits_is_an_error():
    def lost(world):
        world.custom("bad", lambda: 1 / 0, async_op=True)
        return "done"

    with pytest.raises(
        minipar.RankError, match=r"(?s)ZeroDivisionError.*bad of comm 'world'.*nobody has waited"
    ):
        minipar.run(lost, world_size=1)


def test_an_asynchronous_failure_that_was_raised_is_forgiven():
    def caught(world):
        with pytest.raises(ZeroDivisionError):
            world.custom("bad", lambda: 1 / 0, async_op=True).wait()
        return "done"

    assert minipar.run(caught, world_size=1) == ["done"]


def test_a_very_long_exception_text_comes_shortened():
    def fail(world):
        raise ValueError("begins" + "x" * 20_000_000 + "ends")

    with pytest.raises(minipar.RankError) as caught:
        minipar.run(fail, world_size=1)
    said = str(caught.value)
    assert len(said) < 2 * worker.MAX_CHARACTERS
    assert "ValueError: beginsxxx" in said
    assert said.endswith("xxxends")
    left_out = int(re.search(r"([\d,]+) characters are left out", said)[1].replace(",", ""))
    assert 20_000_000 - worker.MAX_CHARACTERS < left_out < 20_000_000


@pytest.mark.parametrize("length", [0, 9, 10, 11, 25])
def test_a_shortened_text_says_how_much_it_leaves_out(length):
    text = "".join(chr(97 + i) for i in range(length))
    short = worker.shortened(text, most=10)
    if length <= 10:
        assert short == text
    else:
        assert short == f"abcde\n... {length - 10} characters are left out ...\n{text[-5:]}"


# The caller's own modules ---------------------------------------------------------------------------------------


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """write(source, at_s): the module `errand`, as the caller has imported it, its file dated at that second."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "errand.py"

    def write(source: str, at_s: float):
        file.write_text(source)
        os.utime(file, ns=(int(at_s * 1e9), int(at_s * 1e9)))
        importlib.invalidate_caches()
        sys.modules.pop("errand", None)
        return importlib.import_module("errand")

    yield write
    sys.modules.pop("errand", None)


def test_ranks_see_edits_to_a_function_of_the_callers_module(own_module):
    errand = own_module("def answer(world):\n    return 1\n", at_s=1000.25)
    assert minipar.run(errand.answer, world_size=2) == [1, 1]
    errand = own_module("def answer(world):\n    return 2 + 0\n", at_s=2000)
    assert minipar.run(errand.answer, world_size=2) == [2, 2]


def test_an_edit_of_the_same_length_within_the_same_second_is_seen(own_module, monkeypatch):
    """Where the caller has written no byte code, which Python would take for that of the edited file, too."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    errand = own_module("def answer(world):\n    return 1\n", at_s=1000.25)
    assert minipar.run(errand.answer, world_size=2) == [1, 1]
    errand = own_module("def answer(world):\n    return 2\n", at_s=1000.75)
    assert minipar.run(errand.answer, world_size=2) == [2, 2]


def test_no_byte_code_in_the_callers_folders_is_touched(own_module, tmp_path, monkeypatch):
    errand = own_module("def answer(world):\n    return 1\n", at_s=1000)
    (byte_code,) = tmp_path.glob("__pycache__/errand*.pyc")
    before = byte_code.stat()
    assert minipar.run(errand.answer, world_size=2) == [1, 1]
    monkeypatch.chdir("/")  # from where the module may be another one
    assert minipar.run(errand.answer, world_size=2) == [1, 1]
    assert byte_code.stat() == before
    assert list(tmp_path.glob("__pycache__/*")) == [byte_code]


def test_an_edit_leaves_what_python_and_torch_brought_in_place(own_module):
    def ask(world):
        import errand

        return errand.VALUE, torch.ops.aten.add(torch.ones(1), 1).item(), id(sys.modules["torch.ops"])

    own_module("VALUE = 1\n", at_s=1000)
    (first,) = minipar.run(ask, world_size=1)
    own_module("VALUE = 22\n", at_s=1001)
    (second,) = minipar.run(ask, world_size=1)
    assert (first[0], second[0]) == (1, 22)
    assert first[1:] == second[1:]


def test_only_the_callers_modules_are_his_own():
    installed = (torch, os, pytest, caller)
    assert not any(caller.is_own(module.__file__) for module in installed)
    assert caller.is_own(__file__)


def test_a_module_of_the_same_name_in_another_folder_is_that_one(tmp_path, monkeypatch):
    def ask(world):
        import errand

        return errand.VALUE

    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "errand.py").write_text(f"VALUE = {value}\n")
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        assert minipar.run(ask, world_size=1) == [value]


def test_an_unedited_module_is_imported_once(own_module):
    errand = own_module(
        "import itertools\ncalls = itertools.count()\ndef answer(world):\n    return next(calls)\n", 1000
    )
    assert [minipar.run(errand.answer, world_size=1) for _ in range(3)] == [[0], [1], [2]]
