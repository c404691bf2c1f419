"""Wrong implementations by specification, and unusual ones that are right, for test_judges.py.

generic           mistakes that are made of any right function: a dtype, a size, a number of ranks, strides, nan, state, ...
collectives, data_parallel, tensor_parallel, pipeline, expert, context, layout, inference
                  WRONG and RIGHT: {specification: {mistake or manner: implementation}}
                  WORDS, of some: {specification: {mistake: what the report says of it}}
"""

from tests.spec.wrong import (
    collectives,
    context,
    data_parallel,
    expert,
    inference,
    layout,
    pipeline,
    tensor_parallel,
)

MODULES = (collectives, data_parallel, tensor_parallel, pipeline, expert, context, layout, inference)
WRONG = {name: wrong for module in MODULES for name, wrong in module.WRONG.items()}
RIGHT = {name: right for module in MODULES for name, right in module.RIGHT.items()}
WORDS = {**inference.WORDS, **data_parallel.WORDS}
