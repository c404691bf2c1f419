"""Checks before any rank starts, of a mixture of experts and the ways in which rows get to them. Imports no torch."""

from __future__ import annotations

from minipar.errors import divisors, one_of, require_divides


def check_experts(config) -> None:
    """Raise ValueError where the mixture of experts does not fit the mesh, or the ways to send rows one another."""
    model = config.model
    if model.num_experts and model.moe_every > model.num_layers:
        raise ValueError(
            f"num_experts={model.num_experts}: of num_layers={model.num_layers} layers, none has experts with "
            f"moe_every={model.moe_every}; use moe_every={model.num_layers} or less"
        )
    nodes = config.ep_node_size is not None
    spread = dict(ep=config.ep > 1, ep_node_size=nodes, ep_once_per_node=config.ep_once_per_node)
    if config.model.num_experts:
        require_divides("ep", config.ep, "num_experts", config.model.num_experts)
        if nodes:
            require_divides("ep_node_size", config.ep_node_size, "ep", config.ep)
    elif any(spread.values()):
        name = next(name for name, given in spread.items() if given)
        raise ValueError(
            f"{name}={getattr(config, name)} spreads experts, and num_experts=0: the model has none; leave it out"
        )
    _check_dispatch(config)


def _check_dispatch(config) -> None:
    shadow = config.ep_shadow
    if shadow is not None and not (shadow >= 0 and config.ep > 1):
        raise ValueError(
            f"ep_shadow={shadow} with ep={config.ep}: it is the rows that a replica must save one of several ranks; use 0 "
            "or more with ep=2 or more, or none"
        )
    if shadow is not None and (config.ep_chunks > 1 or config.ep_once_per_node):
        other = "ep_once_per_node=True" if config.ep_once_per_node else f"ep_chunks={config.ep_chunks}"
        raise ValueError(
            f"ep_shadow={shadow} with {other}: rows that stay are not sent in such a way; use one of the two"
        )
    if config.ep_chunks > 1 and config.ep == 1:
        raise ValueError(
            f"ep_chunks={config.ep_chunks} cuts what ep ranks send to one another's experts, and ep=1; use ep_chunks=1, or "
            "ep=2 or more"
        )
    samples = config.batch_size // config.dp // config.microbatches
    most = samples * (config.seq_len // config.cp) * config.model.num_experts
    if config.ep_chunks > max(1, most):
        raise ValueError(
            f"ep_chunks={config.ep_chunks} are more than the {most} rows that a rank could send, a microbatch's tokens to "
            f"num_experts={config.model.num_experts} each; use {most} or fewer"
        )
    if config.ep_once_per_node and config.ep_node_size is None:
        raise ValueError(
            f"ep_once_per_node=True needs ep_node_size, the ranks of a node; use ep_node_size={one_of(divisors(config.ep))}"
        )
