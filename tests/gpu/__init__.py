"""What must hold on GPUs: `make test-gpu`.

layouts.py     the strategies to try on a number of ranks
bodies.py      what a rank does in these tests
test_gpu.py    equivalence, collectives, traffic, memory and faults, by backend; with gloo, a slice of it runs everywhere
report.py      the table of a run, and the page it is written to
__main__.py    the command
"""
