"""The transports, which move bytes between ranks. In reading order:

stream.py         the stream that runs a Comm's operations in call order, and the handle of an asynchronous operation
messages.py       Message, and Channel, the state shared by all Comms of the same ranks and name
transport.py      the contract of the transports, with deadlines; and the tagged transport, for gloo
shared_memory.py  the shared-memory transport, for one machine: long and repeated messages of collectives avoid the socket
linking.py        how two ranks agree to share memory
grouped.py        the grouped transport, for NCCL: a communicator per Comm, messages matched by order alone
checked.py        the grouped transport on gloo, which refuses what would make NCCL hang or mix up messages
transports.py     the choice between them: by the backend, or by MINIPAR_TRANSPORT
existing_group.py a transport on an existing process group
process_groups.py torch's process groups, by name
native_calls.py   torch's own collectives
traffic.py        the count of bytes sent
errors.py         the errors of a message
stream_owner.py   the one thread that may use a stream
diagnosis.py      deadlocks and lost messages, explained from all ranks' message counts
watch.py          deadlines for operations on a GPU, without making the host wait
cuda_stream.py    the stream on CUDA
recording.py      records operations and waits in a trace
cuda_trace.py     a trace in GPU time
"""
