"""Wrong implementations by specification, and unusual ones that are right, for test_judges.py.

tables            all of them: WRONG, RIGHT and WORDS of the modules below
generic           mistakes that are made of any right function: a dtype, a size, a number of ranks, strides, nan, state, ...
blind             what shows in a second call, another group, what the caller keeps, and between steps
collectives, data_parallel, tensor_parallel, pipeline, expert, context, layout, inference
                  WRONG and RIGHT: {specification: {mistake or manner: implementation}}
                  WORDS, of some: {specification: {mistake: what the report says of it}}

The tables are no names of this package: each new rank would compile every module for the one that it needs.
"""
