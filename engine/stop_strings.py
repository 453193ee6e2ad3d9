"""Stop strings: where in a growing text the first of them appears."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to
MAX_CHARACTER_TOKENS = 4  # UTF-8 has at most four bytes a character, a token at least one


class StopMatcher:
    """Decodes a sequence token by token and looks for stop strings.

    The text so far is kept whole, so a stop string may be of any length and lie over any number of
    tokens. `decode` must be the decoding that the final text is made with; a token is decoded together
    with those before it, because bytes and leading spaces depend on their neighbours.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._tokens: list[int] = []
        self._text = ""  # decoded and final
        self._context = 0  # first token of the window that is decoded again
        self._final = 0  # tokens whose text is in `_text`
        self._searched = 0  # characters that were looked at

    def fresh(self) -> StopMatcher:
        """Another one for the same stop strings, without a token."""
        return StopMatcher(self._decode, self._stops, self._min_tokens)

    def push(self, token: int) -> int | None:
        """Append a token; the number of characters of the decoded output before the first stop string, or None.

        Of several stop strings that this token completes, the one that begins first counts. A match
        that is complete while fewer than `min_tokens` tokens are out does not count, nor later.
        """
        self._tokens.append(token)
        text = self._extend()
        searched, self._searched = self._searched, len(text)
        if len(self._tokens) < self._min_tokens:
            return None
        found = [at for stop in self._stops if (at := text.find(stop, max(0, searched - len(stop) + 1))) >= 0]
        if not found:
            return None
        # Bytes that are no text may decode to other lengths in one piece, but what follows them does not.
        whole = self._decode(self._tokens).rstrip(REPLACEMENT)
        return len(whole) - (len(text.rstrip(REPLACEMENT)) - min(found))

    def _extend(self) -> str:
        """The text with that of the newest tokens, whatever of it can change still left out."""
        before = self._decode(self._tokens[self._context : self._final])
        new = self._decode(self._tokens[self._context :])[len(before) :]
        text = self._text + new.rstrip(REPLACEMENT)
        if new.endswith(REPLACEMENT) and len(self._tokens) - self._final < MAX_CHARACTER_TOKENS:
            return text  # the next token may complete the character
        self._text += new
        if new:  # a token without text gives the next one no context
            self._context = self._final
        self._final = len(self._tokens)
        return text
