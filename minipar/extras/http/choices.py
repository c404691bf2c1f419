"""The server "http" of `minipar serve`. Imports no torch."""

from minipar.support.registry import Choice

HTTP = Choice("minipar.extras.http.server:serve_http", "the chat-completions shape of OpenAI's clients")
