"""Other dispatches of tokens to experts. In reading order:

chunked_rows.py      rows in chunks, each sent while the products of another are computed
once_per_node.py     a token is sent to each node once, and copied there to its experts
shadow_placement.py  the choice of hot experts, which are replicated on all ranks for a step
shadowed_experts.py  rows of hot experts stay; the experts' weights are sent to them
expert_balance.py    the choice, by measured load, of the ranks that hold each expert
moved_experts.py     experts are moved between ranks, with their state, at the end of a step
sliced_rows.py       each tp rank sends a slice of the rows, a layout of tp
install.py           installs each dispatch in a mixture
choices.py           the choices of --dispatch and --tp-layout, and which configurations they refuse
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "expert_balance": ["balanced"],
        "moved_experts": ["PlacedAllToAll", "move_experts"],
        "sliced_rows": ["slice_rows"],
        "once_per_node": ["NodeDedupDispatch"],
        "shadow_placement": ["break_even_rows", "choose_shadowed"],
        "shadowed_experts": ["ShadowedAllToAll"],
    },
)
