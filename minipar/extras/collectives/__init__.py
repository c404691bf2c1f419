"""Further algorithms of collectives.

double_tree.py  all-reduce along two binary trees at once, in segments
bruck.py        all-to-all in log p messages
choices.py      the choices of --algorithm
"""
