"""The text of an answer as its tokens come: decoded piece by piece, and cut at a stop string.

The text of new tokens is that of prompt and new tokens decoded together, without that of the prompt: many tokenizers leave
out the space before the first word that they decode. Decoding the whole answer for each token would cost time quadratic in
its length. So only the last few tokens are decoded, once without and once with the new token.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

from minipar.train.data.tokenizer import Codec, Tokenizer

# A character has at most 4 bytes. So what these tokens are decoded to does not depend on the tokens before them, but for
# its beginning, which the text with a further token begins with, too.
CONTEXT = 8


class Text:
    """The text of an answer as it grows, and where it stops.

    prompt      the tokens that it continues
    stop        the text ends before the stop string that is complete first; if several end there, before the longest one
    tokens      the tokens of the answer, to the one that completed a stop string
    has_stopped whether a stop string is complete

    It is the same however the tokens are grouped into calls of `add`. Text that may still change is held back: the bytes of
    an incomplete character, and a possible beginning of a stop string.
    """

    def __init__(self, codec: Codec, stop: Sequence[str] = (), prompt: Sequence[int] = ()):
        self._codec, self._stop = codec, stop
        self._bytes = codec.byte_tokens if isinstance(codec, Tokenizer) else frozenset[int]()
        self.tokens: list[int] = []
        self.has_stopped = False
        self._held = ""  # certain, but a stop string may begin here
        self._recent = self._last(prompt)
        self._known = codec.decode(self._recent)  # the text of these tokens, without what may still change

    def add(self, tokens: Sequence[int], is_last: bool) -> str:
        """Add tokens; return the new text that can no longer change."""
        new = ""
        for token in tokens:
            self.tokens.append(token)
            self._recent.append(token)
            # The text of a byte depends on all bytes around it: they are one text together, or are all invalid.
            if token not in self._bytes:
                new += self._before_stop(self._decode("\N{REPLACEMENT CHARACTER}"))
            if self.has_stopped:
                return new
        if is_last:
            new += self._before_stop(self._decode(uncertain=""))
            new, self._held = new + self._held, ""
        return new

    def _decode(self, uncertain: str) -> str:
        """Return the text that the last tokens add to what is known; it does not end with `uncertain`."""
        text = self._codec.decode(self._recent).removesuffix(uncertain)
        if self._known.startswith(text):
            return ""
        new = text[len(commonprefix((self._known, text))) :]
        self._known = text
        if len(self._recent) > 2 * CONTEXT:
            self._recent = self._last(self._recent)
            self._known = self._codec.decode(self._recent).removesuffix(uncertain)
        return new

    def _last(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens, with all of a sequence of bytes or none."""
        begin = max(0, len(tokens) - CONTEXT)
        while begin > 0 and tokens[begin] in self._bytes:
            begin -= 1
        return list(tokens[begin:])

    def _before_stop(self, new: str) -> str:
        """Return what of the held and the new text comes before a stop string, and cannot be the beginning of one."""
        text, self._held = self._held + new, ""
        if ends := [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stop if stop in text]:
            self.has_stopped = True
            return text[: min(ends)[1]]
        for begin in range(max(0, len(text) - max(map(len, self._stop), default=0) + 1), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self._stop):
                self._held = text[begin:]
                return text[:begin]
        return text
