"""The `minipar` command. Slow imports are made inside the command that needs them, so that `--help` is fast.

train.py, verify.py, plan.py, timeline.py, tokenize.py, generate.py, serve.py, export.py, bench.py, explore.py, spec.py,
learn.py        one command each; learn.py has two; plan_serve.py is `minipar plan --serve`
parse.py        parsing the command line with tyro; a mistake gives a one-line message
flags.py        a run's settings as flags, and back
choices.py      choices by name, and their options as flags
topics.py       --help TOPIC
signals.py      Ctrl-C and SIGTERM during a run
report.py       progress bar, figures and summary of a run
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from errno import EDQUOT, EFBIG, EIO, ENOSPC, EROFS
from signal import SIGINT

from minipar.cli.parse import Parsed, Work, parse_command, parse_commands
from minipar.cli.signals import end_at_next_signal
from minipar.support.errors import RankError, Stopped
from minipar.support.registry import Choice, Kind

DISK_ERRORS = (ENOSPC, EDQUOT, EFBIG, EROFS, EIO)
DESCRIPTION = (
    "Distributed training, every piece written by hand and proved equal to one process. "
    "Each command explains its flags: minipar train --help. "
    "Completion of commands, flags and choices: minipar --tyro-print-completion bash (or zsh)."
)


class WithChoices(Choice):
    """A command whose set of flags depends on the command line.

    `load()` returns a function that makes a `Parsed` from the arguments, a list of strings; None stands for all flags.
    """


# A command loads a function for tyro: its arguments are the flags, its docstring the help, and it returns a callable that
# does the work. Bad requests are then found outside tyro, which would print them in a box.
COMMANDS: Kind[Choice] = Kind(
    "command",
    {
        "train": WithChoices("minipar.cli.train:train_flags", "train a model on text, on any mesh"),
        "verify": WithChoices("minipar.cli.verify:verify_flags", "compare a mesh with one process"),
        "tokenize": Choice("minipar.cli.tokenize:tokenize_command", "write the token ids of a text"),
        "generate": Choice("minipar.cli.generate:generate_command", "generate text from a checkpoint"),
        "serve": Choice(
            "minipar.cli.serve:serve_command", "serve many requests together, of a file or over HTTP"
        ),
        "export": Choice("minipar.cli.export:export_command", "export a checkpoint, unsharded"),
        "timeline": WithChoices("minipar.cli.timeline:timeline_flags", "print and draw pipeline schedules"),
        "plan": WithChoices("minipar.cli.plan:plan_flags", "predict memory and time on GPUs"),
        "bench": Choice("minipar.cli.bench:bench_command", "time minipar against torch's own"),
        "explore": Choice("minipar.cli.explore:explore_command", "open the interactive site"),
        "ideas": Choice("minipar.learn.ideas:ideas_command", "the twelve ideas, and where each is"),
        "spec": Choice("minipar.cli.spec:spec_command", "judge anybody's code by a specification"),
        "exercise": Choice("minipar.cli.learn:exercise", "write a piece yourself, and have it checked"),
        "puzzle": Choice(
            "minipar.learn.puzzles.command:puzzle_command",
            "write one rank's program, for a simulated network",
        ),
        "museum": Choice("minipar.cli.learn:museum", "run real bugs of training and inference"),
        "quiz": Choice("minipar.learn.quiz.command:quiz_command", "ask interview questions"),
    },
)


def main(argv: list[str] | None = None) -> None:
    """Run the command. Exits 0 when done, 1 if a rank failed or a disk is full, 2 on a bad request, 128 + n on signal n.

    A bad request, a full disk and a signal are told in one line.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        _parse(argv)()
        sys.stdout.flush()
    except ValueError as error:
        _exit_with(f"minipar: {error}", 2)
    except RankError as error:
        _exit_with(f"minipar: {_in_brief(error)}", 1)
    except KeyboardInterrupt as end:
        end_at_next_signal()
        stopped = end if isinstance(end, Stopped) else Stopped("interrupted", SIGINT)
        _exit_with(f"minipar: {stopped}" if str(stopped) else "", 128 + stopped.signal)
    except BrokenPipeError:  # the reader, such as `head`, has stopped
        # Otherwise the flush at exit raises again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        of = f"{error.filename}: " if error.filename else ""
        _exit_with(f"minipar: {of}{error.strerror}; make room, or write to another folder", 1)


def _in_brief(error: RankError) -> str:
    """Return the error of a save in one line, since no line of the program is wrong; else the rank's traceback."""
    kind, _, words = error.remote_traceback.rstrip().rpartition("\n")[2].partition(": ")
    return words if kind.endswith(".SaveError") else str(error)


def _exit_with(message: str, code: int) -> None:
    if message:
        print(message, file=sys.stderr)
    raise SystemExit(code)


def _parse(argv: list[str]) -> Work:
    """Return the callable that does the command's work."""
    if argv == ["--version"]:
        return _print_version
    if argv and argv[0].startswith("--tyro-"):
        return parse_commands(argv, _every_command(), DESCRIPTION)
    if argv and not argv[0].startswith("-"):
        return parse_command(argv[0], _function_of(argv[0], COMMANDS[argv[0]], argv[1:]))
    return parse_commands(argv, _described_commands(), DESCRIPTION)


def _print_version() -> None:
    from importlib.metadata import version

    print(f"minipar {version('minipar')}")


def _function_of(name: str, choice: Choice, argv: Sequence[str] | None) -> Parsed:
    """Return the function that tyro parses for a command. Raises a one-line ValueError if an extra cannot be imported."""
    try:
        function = choice.load()
    except Exception as error:  # an extra's module may raise anything when it is imported
        if name in COMMANDS.own:
            raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"command={name!r} is {choice.implementation}, which cannot be imported: {why}"
        ) from error
    return function(argv) if isinstance(choice, WithChoices) else Parsed(function, argv or ())


def _described_commands() -> dict[str, Work]:
    """Return the commands as `minipar --help` lists them."""
    return {name: _described(help) for name, help in COMMANDS.summaries().items()}


def _described(help: str) -> Work:
    def command() -> None:
        pass

    command.__doc__ = f"{help[0].upper()}{help[1:]}."
    return command


def _every_command() -> dict[str, Callable[..., object]]:
    """Return all commands with all their flags, for shell completion."""
    commands = {}
    for name, choice in COMMANDS.usable().items():
        try:
            commands[name] = _function_of(name, choice, None).function
        except ValueError:
            continue
    return commands
