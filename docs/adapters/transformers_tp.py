"""transformers' tensor parallelism: Llama's tp_plan says how each layer of its MLP is cut, and its styles install that."""

import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES


def layer(mesh, name, w, dim):
    weight = DTensor.from_local(w, mesh, [Shard(dim)])
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    del linear.weight  # a Parameter: the caller's own tensor takes its place
    linear.weight = weight
    return ALL_PARALLEL_STYLES[LlamaConfig.base_model_tp_plan[f"layers.*.mlp.{name}"]].install_forward(
        linear, mesh
    )


def mlp(comm, x, gate, up, down):
    mesh = DeviceMesh.from_group(comm.process_group(), comm.device.type)
    gate, up = layer(mesh, "gate_proj", gate, 0), layer(mesh, "up_proj", up, 0)
    return layer(mesh, "down_proj", down, 1)(F.silu(gate(x)) * up(x))
