"""Control tokens of a tokenizer, and how text that merely spells one is kept from becoming one."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

# Added tokens of this shape mark roles even where a tokenizer does not flag them as special (DeepSeek does
# not). Other unflagged ones, such as <think> or runs of blanks, are text that models and data may write.
_ROLE_MARK = re.compile("[<\\[][|\uff5c].*[|\uff5c][>\\]]", re.DOTALL)
# Aliases are made of characters that are private to programs, drawn at random in every process, so that
# no table can hold one; as long as the token, so that a template that counts or cuts text counts the same.
# The first is one of 16 bits, among which patterns search fast.
_FIRST_SIGNS = range(0xE000, 0xF900)
_FURTHER_SIGNS = range(0xF0000, 0xFFFFE)
# First of the characters that stand for signs of control tokens in hidden values; not among those of aliases.
_FIRST_STAND_IN = 0x10F000


class ControlTokens:
    """The control tokens of a fast tokenizer, each with an alias that no value spells.

    Where a template of the job or the model writes a control token, the alias is written instead; values are
    left as they are. In what is rendered, an alias is the control token, and anything that spells one is
    text, however it came about. Few rows spell one. They are encoded by a copy of the tokenizer that differs
    in nothing but the names of its control tokens: there, their usual spelling is ordinary text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        control = [each for each in added if each.special or _ROLE_MARK.fullmatch(each.content)]
        self._tokens = [each.content for each in control if each.content]
        self._pattern = _any_of(self._tokens)
        self._aliases = dict(zip(self._tokens, _draw_aliases(self._tokens), strict=True))
        self._tokens_of = {alias: token for token, alias in self._aliases.items()}
        self._alias_pattern = _any_of(self._tokens_of)
        normalizer = tokenizer.backend_tokenizer.normalizer
        self._normalizer = normalizer if any(each.normalized for each in control) else None
        signs = sorted({sign for token in self._tokens for sign in token if not (sign.isalnum() or sign in " _-\n")})
        self._hidden = {ord(sign): chr(_FIRST_STAND_IN + number) for number, sign in enumerate(signs)}
        self._shown = {ord(stand_in): chr(sign) for sign, stand_in in self._hidden.items()}

    def alias(self, text: str) -> str:
        """A text with aliases for the control tokens that it spells."""
        return self._pattern.sub(lambda match: self._aliases[match[0]], text)

    def alias_within(self, value: Any) -> Any:
        """A value of plain types with aliases in all of its texts."""
        return _map_texts(self.alias, value)

    def unalias(self, text: str) -> str:
        """A text as it reads: control tokens under their own names."""
        return self._alias_pattern.sub(lambda match: self._tokens_of[match[0]], text)

    def unalias_within(self, value: Any) -> Any:
        """A value of plain types with all of its texts as they read."""
        return _map_texts(self.unalias, value)

    def alias_composed(self, text: str, roles: Sequence[str]) -> str:
        """A text with aliases for the control tokens in it that have one of the roles in their name."""

        def replace(match: re.Match[str]) -> str:
            return self._aliases[match[0]] if any(role in match[0] for role in roles) else match[0]

        return self._pattern.sub(replace, text)

    def hide(self, value: Any) -> Any:
        """A value of plain types whose texts can be no part of a control token but its words; same lengths."""
        return _map_texts(lambda text: text.translate(self._hidden), value)

    def show(self, text: str) -> str:
        """A text with the characters back that were hidden."""
        return text.translate(self._shown)

    def spelled_in(self, text: str) -> bool:
        """Whether the text, as the tokenizer would read it, has control tokens other than its aliases."""
        plain = self.unalias(text)
        meant = [self._tokens_of[alias] for alias in self._alias_pattern.findall(text)]
        if self._pattern.findall(plain) != meant:
            return True
        return self._normalizer is not None and self._pattern.findall(self._normalizer.normalize_str(plain)) != meant

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text in which aliases, and nothing else, are control tokens."""
        ids: list[int] = self._renamed.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer with its control tokens under their aliases, their ids unchanged."""
        alias = self._aliases
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in state["added_tokens"]:
            token["content"] = alias.get(token["content"], token["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {alias.get(piece, piece): number for piece, number in model["vocab"].items()}
        else:
            model["vocab"] = [[alias.get(piece, piece), score] for piece, score in model["vocab"]]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if _merged(pair) not in alias]
        if model.get("unk_token") in alias:
            model["unk_token"] = alias[model["unk_token"]]
        state["truncation"] = state["padding"] = None
        return Tokenizer.from_str(json.dumps(state))


def _map_texts(change: Callable[[str], str], value: Any) -> Any:
    """A value of plain types with every text in it, but for the keys of objects, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_texts(change, each) for key, each in value.items()}
    return [_map_texts(change, each) for each in value] if isinstance(value, list) else value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of some texts, the longest that fits."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _draw_aliases(tokens: Sequence[str]) -> list[str]:
    """A text of its own for every token, of the same length."""
    drawn: dict[str, None] = {}
    for token in tokens:
        alias = _draw(len(token))
        while alias in drawn:
            alias = _draw(len(token))
        drawn[alias] = None
    return list(drawn)


def _draw(length: int) -> str:
    further = (secrets.choice(_FURTHER_SIGNS) for _ in range(length - 1))
    return "".join(map(chr, (secrets.choice(_FIRST_SIGNS), *further)))


def _merged(pair: str | list[str]) -> str:
    """What a BPE merge makes; files of older versions write the pair as one text."""
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)
