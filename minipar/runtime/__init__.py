"""Ranks as processes. In reading order:

launch.py         run: call a function on every rank of a local pool; init_from_env: join torchrun's world
pool.py           the caller's side: start the processes, call a function on them, explain a failure
worker.py         a rank's side: receive a function, run it, send back the result
environment.py    torchrun's environment variables, and the largest local pool
serialization.py  functions and results as bytes; the caller's environment
"""
