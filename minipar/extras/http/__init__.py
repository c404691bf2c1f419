"""A server with OpenAI's chat-completions API: `minipar serve RUN --http`.

In reading order:

live.py        requests that arrive while ranks serve: `Desk`, which holds them, and the loop that the ranks run
bodies.py      converts HTTP request bodies to engine requests, and texts and errors to bodies in OpenAI's format
prometheus.py  formats a service's counters as text for Prometheus
app.py         the HTTP routes, written with Starlette
connection.py  uvicorn's connections, with limits on their number and on the time to send a request
server.py      opens the socket, and runs the ranks and uvicorn, for the command
choices.py     the server "http" of `minipar serve`; imports no torch
"""
