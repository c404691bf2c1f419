"""Pipeline schedules that few runs use. In reading order:

two_directions.py      Chimera and DualPipe, drawn only: two copies of the model, run from both ends
building_block.py      V-Min: less memory than 1F1B, longer bubbles
offloaded.py           a schedule of the core with a limit on live activations; the others wait in CPU memory
offloaded_pipeline.py  its pipeline: how a stage offloads a microbatch's activations
sequence_slices.py     Seq1F1B: samples cut into slices of tokens, and the best cut
sliced_pipeline.py     the pipeline of slices: keys and values that a stage keeps between them
slicing.py             where a run's samples are cut, and which samples can be cut
optimal.py             the shortest schedule, by exact search, for small p and m
choices.py             the choices of --schedule, and which configurations they refuse
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "two_directions": ["chimera", "dualpipe", "unfolded"],
        "building_block": ["v_min"],
        "offloaded": ["offloaded"],
        "sequence_slices": ["seq1f1b", "slice_tokens"],
        "optimal": ["optimal"],
    },
)
