"""Ranks as processes. In reading order:

launch.py         run: call a function on every rank of a local pool; init_from_env: join torchrun's world
pool.py           the caller's side: processes, one call to them, and the explanation of a failure
worker.py         a rank's side: take a function, run it, answer
environment.py    what the launcher tells a process
serialization.py  functions and results as bytes; the caller's environment
"""
