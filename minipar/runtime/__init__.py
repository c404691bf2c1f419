"""Ranks as processes. In reading order:

launch.py         run: call a function on every rank of a local pool; init_from_env: join torchrun's world
pool.py           the caller's side: the processes of a world, and a call of a function on them
rank_process.py   a rank's process, as the caller sees it
call.py           one request to the ranks: wait for their answers, explain a failure
forkserver.py     the process that starts the ranks, and ends them when the caller ends
devices.py        the backend of a world and the device of a rank
worker.py         a rank's side: receive a function, run it, send back the result
protocol.py       the messages between the caller and a rank
threads.py        which threads of a rank may still act
stacks.py         where in the caller's script a rank is
output.py         what ranks print, with their rank
torch_state.py    torch's global state, reset between two calls
serialization.py  functions and results as bytes
caller.py         the caller's environment and modules, as a rank takes them over
"""
