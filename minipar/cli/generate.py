"""`minipar generate`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

from functools import partial
from pathlib import Path
from typing import Any

import tyro

from minipar.cli.parse import Work
from minipar.config.check_paths import check_generate


def generate_command(
    run: tyro.conf.Positional[Path],
    prompt: str = "The ",
    tokens: int = 300,
    temperature: float = 0.0,
    seed: int = 0,
    tp: int = 1,
    pp: int = 1,
) -> Work:
    """Generate text from the newest complete checkpoint of a run, on tp x pp local ranks.

    Args:
        run: the folder of a run that was trained with --checkpoint-every.
        prompt: the text to continue.
        tokens: number of tokens to generate; bytes if the run was trained on bytes.
        temperature: 0 takes the most likely token each time; above 0, tokens are sampled.
        seed: random seed of the sampling.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
    """
    return partial(_generate, run, prompt, tokens, temperature, tp=tp, pp=pp, seed=seed)


def _generate(run: Path, prompt: str, tokens: int, temperature: float, **options: Any) -> None:
    check_generate(run, tokens, temperature, options["tp"], options["pp"], options["seed"])
    from minipar.train import generate_text

    text = generate_text(run, prompt, tokens, temperature, **options)
    print(text)
