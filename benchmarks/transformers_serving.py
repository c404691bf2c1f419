"""Serving the same requests with the same weights: our engine against transformers' continuous batching

The Llama of random weights is written by `export_llama`; ours keeps it in memory, theirs loads what was written. Both have
blocks of 16 tokens, at most 256 tokens a step and no prefix cache, in float32 on the CPU, and write 32 tokens a request,
greedily; `theirs` is `generate_batch`. Both make their cache anew for each run. The notes give tokens a second, and how
many texts are equal, token for token.
"""

from __future__ import annotations

import logging
import random
import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import Row, Times, race, row, run
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, Options, Request
from minipar.mesh import Placement
from minipar.model import Transformer
from minipar.train.checkpoint.export import export_llama
from minipar.train.checkpoint.restore import Checkpoint, newest_whole
from minipar.train.checkpoint.saver import Saver, StoredPart

MISSING = "skipped: transformers is not installed; pip install 'minipar[peers]'"
NEW_TOKENS, BLOCK_SIZE, NUM_BLOCKS, TOKEN_BUDGET = 32, 16, 512, 256
SMALL = ModelConfig(dim=128, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=256)
LARGE = ModelConfig(dim=512, num_layers=8, num_heads=8, num_kv_heads=2, max_seq_len=256)
KERNELS = {"fused": "sdpa", "plain": "eager"}  # our attention core, and theirs


def rows(quick: bool = False) -> list[Row]:
    if not find_spec("transformers"):
        print(MISSING)
        return []
    cases = (
        [("fused", SMALL, 8)] if quick else [("fused", SMALL, 32), ("plain", SMALL, 32), ("fused", LARGE, 32)]
    )
    return [
        row(f"{core} against {KERNELS[core]}, dim {config.dim}", [times], bar=1.0, note=note)
        for core, config, number in cases
        for times, note in run(_race, core, config, number, 2 if quick else 5, world_size=1)
    ]


def requests(number: int, vocab_size: int) -> list[Request]:
    """Requests with prompts of 16 to 96 tokens."""
    draw = random.Random(0)
    return [
        Request(tuple(draw.randrange(vocab_size) for _ in range(draw.randrange(16, 97))), NEW_TOKENS)
        for _ in range(number)
    ]


def random_llama(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return a Llama with weights so wide that the next token depends on all tokens; at the usual ones it hardly does."""
    model, generator = Transformer(config, dtype=dtype), torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=1.5 / p.shape[1] ** 0.5, generator=generator)
    return model


def export(world: Comm, model: Transformer, folder: Path) -> None:
    """Write a checkpoint of the model and export it as a Llama, as `minipar export --layout llama` does."""
    parts = [
        StoredPart("parameter", Placement.whole(name, tuple(p.shape)), p)
        for name, p in model.named_parameters()
    ]
    with tempfile.TemporaryDirectory() as checkpoints:
        Saver(world, Path(checkpoints), wait=True).save(1, parts, {"model": vars(model.config)})
        path = newest_whole(Path(checkpoints))
        assert path is not None
        export_llama(Checkpoint(path), folder)


def load(folder: Path, attention: str, dtype: torch.dtype) -> Any:
    """Return the model that transformers reads from the folder."""
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=dtype, local_files_only=True
    )


def generated(model: Any, several: Sequence[Request]) -> list[list[int]]:
    """Return the new tokens of each request, one after another, by `generate`."""
    return [
        model.generate(
            torch.tensor([request.prompt]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
            generation_config=_greedy(request.max_new_tokens),
        )[0, len(request.prompt) :].tolist()
        for request in several
    ]


def generated_together(model: Any, several: Sequence[Request]) -> list[list[int]]:
    """Return the new tokens of each request by `generate_batch`, all requests there from the start.

    All must ask for equally many new tokens. Raises RuntimeError where one of them is not served.
    """
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    config = import_module("transformers.generation").ContinuousBatchingConfig(
        page_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=TOKEN_BUDGET, allow_block_sharing=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate_batch(
            [list(request.prompt) for request in several],
            generation_config=_greedy(several[0].max_new_tokens),
            continuous_batching_config=config,
            warmup=False,
        )
    if len(found) != len(several):
        raise RuntimeError(f"generate_batch served {len(found)} of {len(several)} requests; see its messages")
    return [list(output.generated_tokens) for output in found.values()]


def served(model: Transformer, several: Sequence[Request]) -> list[list[int]]:
    """Return the new tokens of each request by our engine."""
    options = Options(BLOCK_SIZE, NUM_BLOCKS, TOKEN_BUDGET, max_running=256, prefix_cache=False)
    return [result.tokens for result in Engine(model, options).run(several)]


def _greedy(new_tokens: int) -> Any:
    no_token = -1  # no text ends before it is this long
    return import_module("transformers").GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=no_token, pad_token_id=0
    )


def _race(world: Comm, core: str, config: ModelConfig, number: int, rounds: int) -> tuple[Times, str]:
    ours = random_llama(ModelConfig(**{**vars(config), "attention": core}))
    several = requests(number, config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        export(world, ours, Path(folder))
        theirs = load(Path(folder), KERNELS[core], torch.float32)
    equal = sum(a == b for a, b in zip(served(ours, several), generated_together(theirs, several)))
    times = race(world, lambda: served(ours, several), lambda: generated_together(theirs, several), rounds)
    a, b = (number * NEW_TOKENS / median(side) for side in zip(*times))
    return times, f"{a:,.0f} tokens/s against {b:,.0f}; {equal} of {number} texts are equal"
