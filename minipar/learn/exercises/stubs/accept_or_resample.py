"""The rule of speculative decoding: which guesses of a draft to keep, so that the text has the model's own distribution.

    accept guess x, drawn from q, with probability min(1, p(x) / q(x))
    after a rejection draw from max(0, p - q), normalised, and stop        without a rejection draw one more token from p

    p = [0.7, 0.3], q = [0.5, 0.5]    guess 0 is kept; guess 1 is kept with probability 0.6, otherwise 0 is drawn:
                                      token 0 results with probability 0.5 + 0.5 * 0.4 = 0.7

    q(x) min(1, p(x)/q(x))  +  (probability of a rejection) * residual(x)   =   min(p, q)(x) + max(0, p - q)(x)   =   p(x)

Checked: the probability of every text, over all guesses and all decisions of the dice, to 1e-12 in float64 and 1e-5 in
float32; guesses are accepted as often as any rule can. Also without guesses, if p or q has zeros, and if p = q.
"""


def accept_or_resample(p, guesses, dice):
    """Return the new tokens, a list of 1 to g + 1 ints: the accepted guesses and one more token.

    p         [g + 1, V] float64 or float32, the model's distributions: p[i] after the first i guesses
    guesses   g pairs (token, q): an int, and q [V], the distribution it was drawn from
    dice      dice.accepts(i, probability) -> bool decides on guess i; dice.draw(i, x) -> int draws the i-th new token from
              x [V], which sums to 1. Call each at most once per index. Use no other source of randomness.

    p and q belong to the caller: do not write to them.
    """
    raise NotImplementedError
