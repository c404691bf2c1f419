"""Small Hugging Face models of random weights in float64, and their training under each wrapper or in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minipar.comm import Comm
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.tensor_parallel import Column, Divided, tensor_parallel
from tests.data_parallel.user_models import Trained, whole

VOCAB = 96
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
HEADS = {f"*.{which}_proj": Column(unit=8) for which in "qkv"}


class Architecture(NamedTuple):
    """A class of transformers, its configuration's class, its options, and its plan of tensor parallelism.

    refused  plan -> what is said where the model cannot be cut that way
    """

    model: str
    config: str
    options: dict[str, Any]
    plan: Any = None
    refused: tuple[tuple[Any, str], ...] = ()


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", SIZES, "llama"),
    "llama-tied": Architecture("LlamaForCausalLM", "LlamaConfig", {**SIZES, "tie_word_embeddings": True}, "llama"),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", SIZES, "llama"),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", SIZES, "llama"),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 8}, "llama"),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", {**SIZES, "head_dim": 8}, "llama"),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "head_dim": 8}, "llama"),
    "gpt2": Architecture(
        "GPT2LMHeadModel", "GPT2Config",
        dict(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=1, eos_token_id=2,
        ),
        "gpt2",
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", "Phi3Config", SIZES,
        {"*.mlp.gate_up_proj": Column(parts=2), "*.mlp.down_proj": "row"},
        (("llama", r"'\*\.q_proj'"),),
    ),
    "opt": Architecture(
        "OPTForCausalLM", "OPTConfig",
        dict(
            vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32, word_embed_proj_dim=32, dropout=0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
        {**HEADS, "*.out_proj": "row", "*.fc1": "column", "*.fc2": "row", "*.self_attn": Divided(("num_heads",))},
        (("llama", r"'\*\.o_proj'"),),
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_local_experts": 4},
        {**HEADS, "*.o_proj": "row"},
        (("llama", r"'\*\.gate_proj'"),),
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM", "OlmoeConfig", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},
        None,
        (("llama", r"'\*\.gate_proj'|[qk]_norm"), ({**HEADS, "*.o_proj": "row"}, "[qk]_norm")),
    ),
}  # fmt: skip
# Adam divides by the root of a square: where the exact gradient is zero, the default eps would make rounding visible.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
}
OPTIONS = {"SGD": dict(lr=0.1), "AdamW": dict(lr=1e-2, eps=1e-3)}
STEPS = 3


class InFloat64(TorchFunctionMode):
    """A context in which what a model wants to compute in float32 is computed in float64.

    Norms, routers and positions are computed in float32 whatever the model's dtype, and Gemma's norms even sum gradients
    over the batch in it: so no two orders of addition would agree to 1e-10.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def build(name: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    a = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, a.config)(**a.options, use_cache=False, experts_implementation="eager")
    model = getattr(transformers, a.model)(config)
    return model.double()


def batch(step: int) -> Tensor:
    return torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(step))


def layers_of(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes that the model itself names as units."""
    return tuple({type(m) for m in model.modules() if type(m).__name__ in model._no_split_modules})


def train(
    name: str, optimizer: str, wrapper: str | None, world: Comm | None, lose: str | None = None
) -> Trained:
    """Train for three steps; `lose` names the parameter whose gradient is lost on the last rank."""
    model = build(name)
    shard = slice(None) if world is None or wrapper == "tp" else slice(world.rank, None, world.size)
    kind, options = OPTIMIZERS[optimizer], OPTIONS[optimizer]
    called: nn.Module = model
    if wrapper == "ddp":
        called = DDP(model, world)
    elif wrapper == "fsdp":
        called = FSDP(model, world, units=layers_of(model))
    elif wrapper == "tp":
        tensor_parallel(model, world, plan=ARCHITECTURES[name].plan)
    if lose is not None and world.rank == world.size - 1:
        model.get_parameter(lose).register_hook(torch.zeros_like)
    if wrapper == "zero":
        update = ZeroOptimizer(model.named_parameters(), kind, world, **options)
    else:
        update = kind(model.parameters(), **options)
    losses, gradients = [], {}
    for step in range(STEPS):
        ids = batch(step)[shard]
        with InFloat64():
            loss = called(input_ids=ids, labels=ids).loss
            loss.backward()
        losses.append(loss.detach() if world is None else world.all_reduce(loss.detach(), "mean"))
        if step == 0:
            held = update.shards if wrapper == "zero" else list(model.parameters())
            gradients = whole(model, held, lambda p: p.grad, world)
        update.step()
        update.zero_grad()
    return Trained(losses, gradients, whole(model, list(model.parameters()), Tensor.detach, world))
