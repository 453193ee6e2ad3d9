"""Control tokens of a tokenizer, and how text that merely spells one is kept from becoming one."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

# Added tokens of this shape mark roles even where a tokenizer does not flag them as special (DeepSeek does
# not). Other unflagged ones, such as <think> or runs of blanks, are text that models and data may write.
_ROLE_MARK = re.compile("[<\\[][|\uff5c].*[|\uff5c][>\\]]", re.DOTALL)
# Of 16 bits each: nobody can write an alias into a table, because nobody knows the number of this process.
_SECRET_DIGITS = 24
# First of the characters that stand for those of control tokens while values are hidden; private to programs.
_FIRST_STAND_IN = 0x10F000


class ControlTokens:
    """The control tokens of a fast tokenizer, each with an alias that no value can spell.

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
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")
        # Digits alone pass unchanged through every filter of a template.
        self._secret = "".join(secrets.choice("123456789") for _ in range(_SECRET_DIGITS))
        self._alias_pattern = re.compile(f"\ufdd0{self._secret}([0-9]+)\ufdd1")
        normalizer = tokenizer.backend_tokenizer.normalizer
        self._normalizer = normalizer if any(each.normalized for each in control) else None
        signs = sorted({sign for token in self._tokens for sign in token if not (sign.isalnum() or sign in " _-\n")})
        self._hidden = {ord(sign): chr(_FIRST_STAND_IN + number) for number, sign in enumerate(signs)}
        self._shown = {ord(stand_in): chr(sign) for sign, stand_in in self._hidden.items()}

    def alias(self, text: str) -> str:
        """A text with aliases for the control tokens that it spells."""
        return self._pattern.sub(lambda match: self._alias(self._numbers[match[0]]), text)

    def alias_within(self, value: Any) -> Any:
        """A value of plain types with aliases in all of its texts."""
        if isinstance(value, str):
            return self.alias(value)
        if isinstance(value, dict):
            return {key: self.alias_within(each) for key, each in value.items()}
        return [self.alias_within(each) for each in value] if isinstance(value, list) else value

    def unalias(self, text: str) -> str:
        """A text as it reads: control tokens under their own names."""
        return self._alias_pattern.sub(lambda match: self._tokens[int(match[1])], text)

    def alias_composed(self, text: str, roles: Sequence[str]) -> str:
        """A text with aliases for the control tokens in it that have one of the roles in their name."""
        return self._pattern.sub(
            lambda match: (
                self._alias(self._numbers[match[0]]) if any(role in match[0] for role in roles) else match[0]
            ),
            text,
        )

    def hide(self, value: Any) -> Any:
        """A value of plain types whose texts can be no part of a control token but its words; same lengths."""
        if isinstance(value, str):
            return value.translate(self._hidden)
        if isinstance(value, dict):
            return {key: self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list) else value

    def show(self, text: str) -> str:
        """A text with the characters back that were hidden."""
        return text.translate(self._shown)

    def spelled_in(self, text: str) -> bool:
        """Whether the text, as the tokenizer would read it, has control tokens other than its aliases."""
        plain = self.unalias(text)
        meant = [int(number) for number in self._alias_pattern.findall(text)]
        return self._spelled(plain) != meant or (
            self._normalizer is not None and self._spelled(self._normalizer.normalize_str(plain)) != meant
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text in which aliases, and nothing else, are control tokens."""
        ids: list[int] = self._renamed.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _alias(self, number: int) -> str:
        return f"\ufdd0{self._secret}{number}\ufdd1"

    def _spelled(self, text: str) -> list[int]:
        return [self._numbers[token] for token in self._pattern.findall(text)]

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer with its control tokens under their aliases, their ids unchanged."""
        alias = {token: self._alias(number) for token, number in self._numbers.items()}
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


def _merged(pair: str | list[str]) -> str:
    """What a BPE merge makes; files of older versions write the pair as one text."""
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)
