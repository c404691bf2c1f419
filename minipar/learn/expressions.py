"""The names that expressions in claims.toml, facts.toml and problems.toml may use: functions, machines, models, jobs."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log
from typing import Any

from minipar.cost import activations, collectives, links, memory, models, serving, stages, traffic
from minipar.cost.layout import Implementation, Job, Layout
from minipar.cost.machines import MACHINES
from minipar.cost.model_table import MODELS, gpt
from minipar.schedules import dualpipe_v, gpipe, one_f_one_b, simulate

_H100, _A100 = MACHINES["h100"], MACHINES["a100-80gb"]
VALUES: dict[str, Any] = dict(
    H100=_H100,
    A100=_A100,
    B200=MACHINES["b200"],
    GPT3=MODELS["gpt3-175b"],
    LLAMA7=MODELS["llama-7b"],
    LLAMA70=MODELS["llama-70b"],
    TRILLION=gpt("1T", 128, 25600, 160),
    J7=Job(MODELS["llama-7b"], _A100, 8, 4096, 64),
    J70=Job(MODELS["llama-70b"], _A100, 64, 4096, 1024),
    JPLAIN=Job(
        MODELS["llama-70b"], _H100, 64, 4096, 64, implementation=Implementation(sequence_parallel=False)
    ),
    JSEQ=Job(MODELS["llama-70b"], _H100, 64, 4096, 64),
    JLONG=Job(MODELS["llama-7b"], _H100, 64, 65536, 64),
    JTOP1=Job(replace(MODELS["mixtral-8x7b"], top_k=1), _H100, 8, 4096, 8),
    JTOP2=Job(MODELS["mixtral-8x7b"], _H100, 8, 4096, 8),
)
MEANING = {
    "H100, A100": "machines of minipar's table, an H100 and an A100 of 80 GB",
    "B200": "one of the same table",
    "GPT3, LLAMA7, TRILLION": "model shapes: GPT-3, Llama 2 7B, Megatron's of 10^12 parameters",
    "LLAMA70": "the shape of Llama 2 70B",
    "J7": "Llama 2 7B on 8 A100, 64 samples of 4,096 tokens a step",
    "J70": "Llama 2 70B on 64 A100, 1,024 samples of 4,096 tokens a step",
    "JSEQ, JPLAIN": "Llama 2 70B on 64 H100, with sequence parallelism and without",
    "JLONG": "Llama 2 7B on 64 H100, samples of 65,536 tokens",
    "JTOP1, JTOP2": "Mixtral 8x7B on 8 H100, one expert a token and two",
}
_MODULES = (activations, collectives, links, memory, models, serving, stages, traffic)
FUNCTIONS: dict[str, Any] = {
    name: value
    for module in _MODULES
    for name, value in vars(module).items()
    if callable(value) and name.islower() and not name.startswith("_")
} | dict(
    Layout=Layout,
    dualpipe_v=dualpipe_v,
    gpipe=gpipe,
    one_f_one_b=one_f_one_b,
    simulate=simulate,
    sum=sum,
    abs=abs,
    ceil=ceil,
    log=log,
)
