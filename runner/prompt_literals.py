"""The literals of a Jinja template: its text between the tags and the strings in its expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jinja2 import Environment

# After one of these, a string is what a value is held against, not what the template writes.
_COMPARING = {"==", "!=", "in", "is"}
_SEARCHING = {
    *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex"),
    *("count", "replace", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"),
}


@dataclass(frozen=True)
class _Piece:
    """A piece of template source, of one kind of jinja2's lexer: data, string, operator, name ..."""

    kind: str
    text: str


def rewrite_literals(source: str, environment: Environment, rewrite: Callable[[str], str]) -> str:
    """The template with `rewrite` applied to everything that it may write of its own.

    Strings that are only held against values (`'x' in text`, `text == 'x'`, `text.split('x')`,
    `text | replace('x', '')`) are left as they are, so that they find in values what they found before.

    Raises:
        TemplateSyntaxError: the source is no template.
    """
    pieces = [_Piece(kind, text) for _, kind, text in environment.lex(source)]
    code = [at for at, piece in enumerate(pieces) if piece.kind != "whitespace"]
    searched = {code[place] for place in _searched(pieces, code)}
    texts = []
    for at, piece in enumerate(pieces):
        if piece.kind == "data":
            texts.append(rewrite(piece.text))
        elif piece.kind == "string" and at not in searched:
            texts.append(_rewrite_string(piece.text, rewrite))
        else:
            texts.append(piece.text)
    return "".join(texts)


def _searched(pieces: Sequence[_Piece], code: Sequence[int]) -> Iterator[int]:
    """The places in `code` of strings that are held against values."""
    texts = ["", "", "", *(pieces[at].text for at in code), ""]
    for place, at in enumerate(code):
        if pieces[at].kind != "string":
            continue
        before, after = texts[: place + 3], texts[place + 4 :]
        compared = before[-1] in _COMPARING or after[0] in _COMPARING or after[:2] == ["not", "in"]
        is_argument = before[-1] == "(" and before[-2] in _SEARCHING and before[-3] in (".", "|")
        if compared or is_argument:
            yield place


def _rewrite_string(quoted: str, rewrite: Callable[[str], str]) -> str:
    """A string literal with its value rewritten; Jinja reads Python's escapes."""
    value = quoted[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
    rewritten = rewrite(value)
    if rewritten == value:
        return quoted
    return '"' + rewritten.encode("unicode-escape").decode("ascii").replace('"', '\\"') + '"'
