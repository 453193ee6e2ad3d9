"""Stop strings: where in a growing text the first of them appears."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to


class StopMatcher:
    """Decodes a sequence token by token and looks for stop strings.

    The text so far is kept whole, so a stop string may be of any length and lie over any number of
    tokens. `decode` must be the decoding that the final text is made with; a token is decoded together
    with those before it, because bytes and leading spaces depend on their neighbours.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._min_tokens = min_tokens
        self._tokens: list[int] = []
        self._text = ""  # decoded and final
        self._context = 0  # first token of the window that is decoded again
        self._final = 0  # tokens whose text is in `_text`

    def push(self, token: int) -> int | None:
        """Append a token; the number of characters before the first stop string, or None.

        Of several stop strings that this token completes, the one that begins first counts. A match
        while fewer than `min_tokens` tokens are out does not count.
        """
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._final])
        new = self._decode(self._tokens[self._context :])[len(before) :]
        searched = len(self._text)
        text = self._text + new.rstrip(REPLACEMENT)
        if not new.endswith(REPLACEMENT):  # else the next token may complete the character
            self._text = text
            self._context, self._final = self._final, len(self._tokens)
        if len(self._tokens) < self._min_tokens:
            return None
        start = max(0, searched - self._longest + 1)
        found = [at for stop in self._stops if (at := text.find(stop, start)) >= 0]
        return min(found, default=None)
