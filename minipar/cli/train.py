"""`minipar train`."""

# No `from __future__ import annotations`: tyro evaluates the annotations, and some of these refer to local variables,
# which no type checker can follow.

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import tyro

from minipar.cli.choices import as_flag, flag_name, make_flag, make_flags, option_fields
from minipar.cli.flags import config_of
from minipar.cli.parse import Parsed, Work
from minipar.cli.report import Progress, print_summary
from minipar.cli.signals import StopRequest
from minipar.cli.topics import asked_topic, run_flags
from minipar.config.check_paths import check_paths
from minipar.config.choices import CHOSEN
from minipar.config.train_config import TrainConfig
from minipar.support.errors import Stopped
from minipar.support.options import make_options
from minipar.support.registry import Choice, Kind

# What `minipar train --NAME` does with a run's settings instead of training. A choice loads a function: config, options ->
# the exit status. Its options are flags without a prefix.
INSTEAD: Kind[Choice] = Kind("instead", {})
_PLAIN_HELP = "instead of training, {}; --help-all shows its options"


def train_flags(argv: Sequence[str] | None) -> Parsed:
    """Return the command, whose flags depend on what `argv` chooses."""
    settings, words, below_help = run_flags(argv, TrainConfig(), "train")
    others = _instead_flags(argv)

    def train_command(
        flags: Annotated[type(settings), tyro.conf.arg(name="")] = settings,  # type: ignore[valid-type]
        instead: Annotated[type(others), tyro.conf.arg(name="")] = others,  # type: ignore[valid-type]
    ) -> Work:
        """Train a byte-level model on text, on local ranks or under torchrun, and compare its first steps with one process.

        Args:
            flags: the settings of the run.
            instead: what is done with them instead of training.
        """
        asked, options = _asked(instead)
        return partial(_train, flags) if asked is None else partial(_do_instead, flags, asked, options)

    return Parsed(train_command, words, below_help)


def _instead_flags(argv: Sequence[str] | None) -> Any:
    """Return the flags of all that can be done instead of training: for each a switch, --NAME, and its options.

    Plain --help, which imports no other package's extra, shows the switches alone. Raises a one-line ValueError if
    `argv` asks for an extra that cannot be imported.
    """
    given = {flag_name(word) for word in argv or ()}
    for name in INSTEAD.declared():
        if name in given:
            INSTEAD[name]
    topic = None if argv is None else asked_topic(argv)
    # Stays empty for `--help TOPIC`, which shows only that topic's flags, unless the topic is "all" or "run".
    choices: Mapping[str, Choice] = {}
    if topic == "":
        choices = {name: Choice(help=_PLAIN_HELP.format(help)) for name, help in INSTEAD.summaries().items()}
    elif topic in (None, "all", "run"):
        choices = INSTEAD.usable()
    unprefixed: Any = tyro.conf.OmitArgPrefixes
    members = []
    for name, choice in choices.items():
        switch = name, Annotated[bool, tyro.conf.arg(help=choice.help)], False
        options = {} if choice.options is None else option_fields(choice.options)
        flags = make_flags(name, [switch, *(make_flag(f, hint, f.default) for f, hint in options.values())])
        members.append((name, unprefixed[type(flags)], flags))
    return make_flags("Instead", members)


def _asked(instead: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the name of what is asked for instead of training, or None, and the values of its options."""
    asked: dict[str, dict[str, Any]] = {}
    for name, flags in vars(instead).items():
        options = dict(vars(flags))
        if options.pop(name):
            asked[name] = options
        elif given := [as_flag(key) for key, value in options.items() if value != getattr(type(flags), key)]:
            raise ValueError(f"{given[0]} is an option of {as_flag(name)}; use that, too, or leave it out")
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(map(as_flag, asked))}: each replaces training; use one of them")
    return next(iter(asked.items()), (None, {}))


def _train(flags: Any) -> None:
    config = config_of(flags, TrainConfig)
    check_paths(config)
    import_chosen(config)
    from minipar.train import train

    def tell(what: str, metrics: dict[str, float]) -> None:
        progress(what, metrics)
        if what == "verify":
            stop.in_comparison()

    with Progress(config) as progress, StopRequest(config.checkpoint_every > 0) as stop:
        try:
            result = train(config, tell, stop)
        except Stopped as stopped:
            stopped.signal = stopped.signal or stop.signal
            raise
    if result is not None:
        print_summary(result)


def _do_instead(flags: Any, name: str, given: dict[str, Any]) -> None:
    config = config_of(flags, TrainConfig)
    check_paths(config, writes=False)
    import_chosen(config)
    choice = INSTEAD[name]
    options = None if choice.options is None else make_options(choice.options, name, given)
    raise SystemExit(_imported(INSTEAD.name, name, choice)(config, options))


def import_chosen(config: TrainConfig) -> None:
    """Import all that a run chooses by name. Raises a one-line ValueError if an extra cannot be imported."""
    for name, kind in CHOSEN.items():
        choice = config.choice(name)
        if getattr(config, name) not in kind.own and choice.implementation:
            _imported(name, getattr(config, name), choice)


def _imported(kind: str, name: str, choice: Choice) -> Any:
    try:
        return choice.load()
    except Exception as error:  # an extra's module may raise anything when it is imported
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{kind}={name!r} is {choice.implementation}, which cannot be imported: {why}"
        ) from error
