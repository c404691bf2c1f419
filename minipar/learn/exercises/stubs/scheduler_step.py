"""A step of continuous batching: requests enter and leave at every step, within a budget of tokens and a number of blocks.

A "text" is a request's tokens, prompt and generated ones; a token is "read" once its keys and values are in a block.

    first     decodes: texts with one unread token, in order of arrival
    then      prefill: all other texts, in order of arrival, each as far as the rest of the budget goes

    budget 4: text 0 has 5 unread tokens, texts 1 and 2 have one each    ->    1 reads one, 2 reads one, 0 reads two

    if there are too few free blocks for a text, a later text is preempted and gives up all of its blocks: the latest one
    that holds some and reads nothing in this step. It will read all of its tokens again, prompt and generated ones

Checked: each text in its turn reads as many of its unread tokens as the budget leaves, if it can get blocks for all of
these; no step reads more than the budget; a text that reads a total of n tokens by the end of the step holds
ceil(n / size) blocks, and no other text takes blocks; no text gives up blocks without need, or for a later text; no block
is lost or in two tables. Behind a prompt for which there are too few blocks, shorter prompts may read or wait.
"""


def plan(pool, waiting, budget):
    """Return the work of the next step, a list of (text, tokens): `tokens` are those that the step reads of the text.

    pool       pool.size: tokens per block; pool.free: a list of the free blocks; pool.grow(table, num_tokens) adds blocks
               until the table has enough for `num_tokens`, or adds none and returns False; pool.release(table) frees all
               of the table's blocks, and empties it
    waiting    the unfinished texts, in order of arrival. Each has text.tokens, a list of ints; text.num_read, how many of
               these are in its blocks; text.unread, the list of those that are not; text.table, a list of its blocks
    budget     maximum number of tokens to read, 1 or more

    If a text gives up its blocks, set its num_read to 0; it keeps its tokens. Otherwise only `advance` changes num_read.
    """
    raise NotImplementedError


def advance(pool, pieces, chosen):
    """After the step, update num_read, and append the new token to each text that has read all of its tokens.

    pieces    the list that `plan` returned
    chosen    for each piece, the token that the model chose after it; it counts only if all tokens of the text are read
    text.end  the number of tokens of the finished text; a text with this many tokens releases its blocks at once
    """
    raise NotImplementedError
