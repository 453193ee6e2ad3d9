"""Control tokens of a tokenizer, and how text that merely spells one is kept from becoming one."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from runner.row_problem import RowProblem

# Added tokens of this shape mark roles even where a tokenizer does not flag them as special (DeepSeek does
# not). Other unflagged ones, such as <think> or runs of blanks, are text that models and data may write.
_ROLE_MARK = re.compile("[<\\[][|\uff5c].*[|\uff5c][>\\]]", re.DOTALL)
# Characters that Unicode reserves for a program's internal use frame the number of a control token: `_QUOTED`
# where a value spelled the token, `_ALIAS` where the token itself is meant.
_QUOTED = "\ufdd0{}\ufdd1"
_ALIAS = "\ufdd2{}\ufdd3"
_QUOTED_PATTERN = re.compile("\ufdd0([0-9]+)\ufdd1")
_RESERVED = re.compile("[\ufdd0-\ufdd3]")


class ControlTokens:
    """The control tokens of a fast tokenizer.

    Few rows spell a control token. Those that do are quoted before rendering, so that afterwards the text
    tells what a value spelled from what the template wrote, and are encoded by a copy of the tokenizer that
    differs in nothing but the names of its control tokens: there, their usual spelling is ordinary text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._tokens = [each.content for each in added if each.special or _ROLE_MARK.fullmatch(each.content)]
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")

    def spelled_in(self, value: Any) -> bool:
        """Whether a text, or any text in lists and dicts, spells a control token."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, dict):
            return any(map(self.spelled_in, value.values()))
        return isinstance(value, list) and any(map(self.spelled_in, value))

    def quote(self, value: Any) -> Any:
        """`value` with every spelled control token replaced by its number in reserved characters.

        Raises:
            RowProblem: the text already holds such characters.
        """
        if isinstance(value, dict):
            return {key: self.quote(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.quote(each) for each in value]
        if not isinstance(value, str) or not value:
            return value
        if _RESERVED.search(value):
            raise RowProblem(
                "the text holds both a control token of the model and one of the characters U+FDD0 to U+FDD3, "
                "which Unicode reserves; remove them from the text"
            )
        return self._pattern.sub(lambda match: _QUOTED.format(self._numbers[match[0]]), value)

    def unquote(self, text: str) -> str:
        """The text as it was meant to read."""
        return _QUOTED_PATTERN.sub(lambda match: self._tokens[int(match[1])], text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a rendered text whose values were quoted."""
        aliased = self._pattern.sub(lambda match: _ALIAS.format(self._numbers[match[0]]), text)
        ids: list[int] = self._renamed.encode(self.unquote(aliased), add_special_tokens=add_special_tokens).ids
        return ids

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer with its control tokens under their aliases, their ids unchanged."""
        alias = {token: _ALIAS.format(number) for token, number in self._numbers.items()}
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
