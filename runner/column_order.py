"""Advice on the order in which a template writes its columns: what is alike in many rows belongs first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.config import RunConfig
from runner.job_inputs import JobInputs
from runner.plan import shared_with_previous
from runner.prompt import read_template
from runner.prompt_reader import TemplateReader
from runner.row_problem import RowProblem
from runner.template_sections import TemplateSections, split_template

TokenIds = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

SAMPLE_ROWS = 10_000
SAMPLE_CHARACTERS = 4 << 20
"""The rows that are judged are the first ones, up to these bounds: about a second of tokenising."""
MOST_PERMUTED = 4
"""Sections of which all orders are tried, 24 at most; of more, only that by the number of their different texts."""
WORTH_TELLING = 0.01
"""Share of the prompt tokens below which a saving is none: tokens across the borders of sections are a guess."""


def advise_columns(config: RunConfig, inputs: JobInputs) -> str:
    """What another order of the template's columns would save in the prefix cache, in a sentence.

    The template is cut into sections (`TemplateSections`), and H* of the first rows counted with the sections in
    other orders. `config` has a template.
    """
    parts = split_template(read_template(config.prompt)[2])
    if parts is None or len(parts.sections) < 2:
        return "no advice: only a template of text and two or more {{ }}, without statements, is judged"
    rows = _sample(config, inputs, parts)
    sections = SectionTable(rows, parts, inputs.model.tokenizer)
    now = tuple(range(len(parts.sections)))
    saved = {order: sections.hit_tokens(order, config.engine.block_size) for order in _orders(sections)}
    best = max(saved, key=lambda order: saved[order])
    gain = saved[best] - saved[now]
    if gain < WORTH_TELLING * sections.prompt_tokens or not gain:
        return f"no other order saves {WORTH_TELLING:.0%} of the prompt tokens of the first {len(rows):,} rows"
    names = [section.name for section in parts.sections]
    return (
        f"in the order {', '.join(names[at] for at in best)} instead of {', '.join(names)}, the cache would have about "
        f"{gain:,} more of the {sections.prompt_tokens:,} prompt tokens of the first {len(rows):,} rows "
        f"({gain / sections.prompt_tokens:.0%}); that makes other prompts, so compare the answers"
    )


class SectionTable:
    """The sections of some rows as tokens, to count prefix hits with them in any order.

    `texts` are those of each row's sections. `prompt_tokens` are of all rows, head and tail of the template included.
    """

    def __init__(self, texts: Sequence[Sequence[str]], parts: TemplateSections, tokenizer: Any) -> None:
        self._head = len(_tokenize([parts.head], tokenizer)[0])
        self._tail = len(_tokenize([parts.tail], tokenizer)[0])
        self._ids: list[list[TokenIds]] = []  # of the different texts of each section, in order of their ids
        codes = [self._encode([row[at] for row in texts], tokenizer) for at in range(len(parts.sections))]
        self._codes = np.stack(codes, axis=1)  # int64 [rows, sections]
        lengths = [np.array([len(ids) for ids in each], np.int64) for each in self._ids]
        self._lengths = np.stack([lengths[at][self._codes[:, at]] for at in range(len(codes))], axis=1)
        self._totals: Counts = self._head + self._lengths.sum(axis=1) + self._tail
        self.prompt_tokens = int(self._totals.sum())

    @property
    def different_texts(self) -> list[int]:
        """How many different texts each section has."""
        return [len(each) for each in self._ids]

    def hit_tokens(self, order: Sequence[int], block_size: int) -> int:
        """About the most prompt tokens from a prefix cache, with the sections in `order` (see `highest_hit_tokens`)."""
        codes, lengths = self._codes[:, order], self._lengths[:, order]
        by_prefix = np.lexsort(codes[:, ::-1].T)
        codes, lengths, totals = codes[by_prefix], lengths[by_prefix], self._totals[by_prefix]
        equal = np.cumprod(codes[1:] == codes[:-1], axis=1)
        shared = self._head + (lengths[1:] * equal).sum(axis=1)
        alike = equal.sum(axis=1)  # leading sections that two neighbours have in common
        differ = np.flatnonzero(alike < len(order))
        pairs = [
            self._ids[order[at]][codes[row, at]]
            for first, at in zip(differ.tolist(), alike[differ].tolist(), strict=True)
            for row in (first, first + 1)
        ]
        shared[differ] += shared_with_previous(pairs)[1::2]
        return int((np.minimum(shared, totals[1:] - 1) // block_size).sum()) * block_size

    def _encode(self, texts: list[str], tokenizer: Any) -> Counts:
        """Which of the section's different texts each row has."""
        different, codes = np.unique(np.array(texts, object), return_inverse=True)
        ids = _tokenize(different.tolist(), tokenizer)
        order = sorted(range(len(ids)), key=lambda at: ids[at].astype(">u4").tobytes())
        rank = np.empty(len(ids), np.int64)
        rank[order] = np.arange(len(ids))
        self._ids.append([ids[at] for at in order])
        return rank[codes]


def _orders(sections: SectionTable) -> list[tuple[int, ...]]:
    """The orders to compare, the template's own first."""
    different = sections.different_texts
    now = range(len(different))
    if len(different) <= MOST_PERMUTED:
        return list(itertools.permutations(now))
    return [tuple(now), tuple(sorted(now, key=lambda at: different[at]))]


def _sample(config: RunConfig, inputs: JobInputs, parts: TemplateSections) -> list[list[str]]:
    """The texts of the sections of the first rows that render."""
    reader = TemplateReader(*read_template(config.prompt), inputs.source.schema, None)
    rows: list[list[str]] = []
    characters = 0
    limit = SAMPLE_ROWS if config.source.limit is None else min(SAMPLE_ROWS, config.source.limit)
    for batch in inputs.source.batches(reader.columns, config.source.skip, limit):
        for value in reader.values(batch.table):
            if any(isinstance(each, RowProblem) for each in value.values()):
                continue
            try:
                rows.append([section.render(value) for section in parts.sections])
            except RowProblem:
                continue
            characters += sum(map(len, rows[-1]))
            if characters >= SAMPLE_CHARACTERS:
                return rows
    return rows


def _tokenize(texts: list[str], tokenizer: Any) -> list[TokenIds]:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array(ids, np.int32) for ids in encoded]
