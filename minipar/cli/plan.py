"""`minipar plan`."""

# No `from __future__ import annotations`: tyro evaluates the annotations, and some name local variables, which no type
# checker can follow.

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from minipar.cli.choices import chosen_names, every_option, options_flags, options_of
from minipar.cli.parse import Parsed, Work
from minipar.cli.plan_serve import plan_serve_command
from minipar.cli.topics import asked_topic, kind_text, refuse_topic, show_kind, topics_text
from minipar.config.check_paths import require_picture

VIEW_HELP = "a further term of the cost, or another answer"


def plan_flags(argv: Sequence[str] | None) -> Parsed:
    """Return the command; which options it has depends on the view that `argv` chooses, and on --serve."""
    if "--serve" in (argv or ()):
        return Parsed(plan_serve_command, [word for word in argv or () if word != "--serve"])
    from minipar.cost.stages import unplanned

    options, below_help, words = _of_view(argv)

    def plan_command(
        model: str = "llama-70b",
        gpus: int = 64,
        machine: str = "a100-80gb",
        seq: int = 4096,
        batch: int = 1024,
        precision: str = "mixed",
        explain: str | None = None,
        top: int = 10,
        margin: float | None = None,
        program: str = "minipar",
        json: bool = False,
        run: bool = False,
        picture: Path | None = None,
        view: str = "",
        view_options: Annotated[type(options), tyro.conf.arg(name="")] = options,  # type: ignore[valid-type]
    ) -> Work:
        """Predict memory and time of training on GPUs you may not have: of all legal layouts that fit, the one to use.

        Layouts that the model cannot tell apart are counted; the simplest of each mesh is shown, the simplest of all first.
        Each time has its doubt: docs/generated/planner.md compares predictions with published runs.

        The plan covers dp, pp with its schedules, ep, tp, zero, microbatches and recomputation, with AdamW's states; cp
        for samples of more than 8,192 tokens, and for shorter ones if nothing else fits. It does not cover ways of
        dispatching tokens other than all-to-all, compile, and these schedules, layouts of tp and optimizers:
        UNPLANNED.

        minipar plan --serve predicts what serving takes instead; minipar plan --serve --help shows its flags.

        Args:
            model: a name (llama-7b, llama3-405b, gpt3-175b, mixtral-8x7b ...), or a .toml file with the sizes of a model.
            gpus: number of GPUs.
            machine: a name (a100-80gb, a800, h100, h800, h200, b200, mi300x, tpu-v5p, v100), or a .toml file that describes
                a GPU and its node; local is this machine, as described by local.toml or, without one, as measured now.
            seq: tokens per sample.
            batch: samples per step, over all GPUs.
            precision: mixed (2 + 2 + 12 bytes per parameter), mixed-fp32-grads (2 + 4 + 12), float32 or float64.
            explain: itemise one layout instead of searching, such as dp4-pp2-tp8-zero1-mb1-1f1b-full; a schedule may state
                its chunks: interleaved:4. Only explain prices all_gather.
            top: number of layouts to print.
            margin: GB of each GPU to leave free, for fragments and what no formula has; by default a sixteenth, 5 of 80.
            program: the training program to predict: minipar, or one with published runs (megatron-2021, deepspeed-2021,
                composer, fsdp-2023, torchtitan, llama-3), from its options and, for some, numbers fitted to its runs.
            json: print the numbers as JSON, in seconds and bytes.
            run: also print the commands that train with the first layout.
            picture: a .png, .svg or .pdf file for the pictures: memory and time by part, and time against memory.
            view: an additional cost term, or another kind of answer; minipar plan --help view lists them and their options.
            view_options: options of the view.
        """
        how = dict(
            precision=precision, explain=explain, as_json=json, run=run, top=top, margin_gb=margin, program=program
        )  # fmt: skip
        of_view = options_of(view_options).get("view", {})
        return partial(
            _plan, picture, model, gpus, machine, seq, batch, {**how, "view": view, "view_options": of_view}
        )

    plan_command.__doc__ = (plan_command.__doc__ or "").replace("UNPLANNED", ", ".join(unplanned()))
    return Parsed(plan_command, words, below_help)


def _of_view(argv: Sequence[str] | None) -> tuple[Any, str, Sequence[str]]:
    """Return the options of the view that `argv` chooses, the text below the help, and the words that are left to parse."""
    from minipar.cost.plan_command import VIEWS

    kinds = {"view": VIEWS}
    topic = asked_topic(argv or ())
    below_help = topics_text("plan", (), kinds)
    if topic == "all":
        below_help = kind_text("view", VIEWS, VIEW_HELP)
    elif topic:
        show_kind(topic, kinds, {"view": VIEW_HELP})
        refuse_topic(topic, kinds)
    chosen = chosen_names(argv or (), {"view": ""})
    options = every_option(kinds) if argv is None else options_flags(argv, kinds, chosen, {})
    return options, below_help, argv or () if topic is None else ["--help"]


def _plan(
    picture: Path | None, model: str, gpus: int, machine: str, seq: int, batch: int, options: dict[str, Any]
) -> None:
    from minipar.cost.plan_command import plan_command

    if picture is not None:
        require_picture("picture", picture)
    if machine == "local":
        machine = "local.toml"
        if not Path(machine).exists():
            _calibrate(Path(machine))
    outcome = plan_command(model, gpus, machine, seq, batch, **options)
    print(outcome.text)
    if picture is not None:
        from minipar.visualize.cost import draw_plan

        file = draw_plan(outcome.job, outcome.layouts, picture, outcome.plan)
        print(f"wrote {file}", file=sys.stderr)


def _calibrate(path: Path) -> None:
    from minipar.cli import COMMANDS

    COMMANDS["calibrate"].load()(path)()
