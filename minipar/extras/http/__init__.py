"""A server with OpenAI's chat-completions API: `minipar serve RUN --http`.

In reading order:

live.py        requests that arrive and end while ranks serve: the Desk that holds them, and the ranks' loop
bodies.py      HTTP request bodies to engine requests, texts to response bodies, and errors in OpenAI's format
prometheus.py  a service's counters in Prometheus's text format
app.py         the routes, on Starlette
server.py      runs the socket, the ranks and uvicorn for the command
choices.py     the server "http" of `minipar serve`; imports no torch
"""
