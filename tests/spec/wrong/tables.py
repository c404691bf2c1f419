"""Every wrong implementation, every unusual one that is right, and the words for some mistakes, by specification."""

from tests.spec.wrong import (
    blind,
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
WRONG = {
    name: {**wrong, **blind.WRONG.get(name, {})} for module in MODULES for name, wrong in module.WRONG.items()
}
RIGHT = {
    name: {**right, **blind.RIGHT.get(name, {})} for module in MODULES for name, right in module.RIGHT.items()
}
WORDS = {**inference.WORDS, **data_parallel.WORDS}
