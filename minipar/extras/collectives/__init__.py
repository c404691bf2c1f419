"""Further algorithms of collectives.

double_tree.py  all-reduce along two binary trees at once, in segments
choices.py      the choices of --algorithm
"""
