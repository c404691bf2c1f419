"""Further ways to dispatch tokens to experts. In reading order:

chunked_rows.py      sends rows in chunks, each while another chunk is computed
shadow_placement.py  chooses the hot experts, which are replicated on all ranks for a step
shadowed_experts.py  keeps the rows of hot experts on their ranks, and sends the experts' weights to all ranks
expert_balance.py    chooses, by measured load, the ranks that hold each expert
moved_experts.py     moves experts between ranks, with their optimizer state, at the end of a step
sliced_rows.py       sends a slice of the rows from each tp rank, as TED does; a layout of tp
install.py           installs each dispatch in an MoE layer
choices.py           the choices of --dispatch and --tp-layout, and which configurations they refuse
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "expert_balance": ["balanced"],
        "moved_experts": ["PlacedAllToAll", "move_experts"],
        "sliced_rows": ["slice_rows"],
        "shadow_placement": ["break_even_rows", "choose_shadowed"],
        "shadowed_experts": ["ShadowedAllToAll"],
    },
)
