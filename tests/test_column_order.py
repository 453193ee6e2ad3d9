"""Advice on the order of a template's columns, against what jobs with either order really hit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from runner.column_order import SectionTable
from runner.plan import highest_hit_tokens, order_rows
from runner.template_sections import split_template
from tests.job_runs import TinyJob
from tests.tiny_models import tiny_tokenizer

DOCUMENTS = [f"document {at} {'words ' * (12 + at % 3)}" for at in range(8)]
QUESTIONS = [f"what about {'very ' * (at % 4)}old thing {at}?" for at in range(5)]
ROWS = [(question, document) for question in QUESTIONS for document in DOCUMENTS]
QUESTION_FIRST = "Answer briefly.\nQuestion: {{ q }}\nDocument: {{ doc }}\nAnswer:"
DOCUMENT_FIRST = "Answer briefly.\nDocument: {{ doc }}\nQuestion: {{ q }}\nAnswer:"


@pytest.fixture(scope="module")
def rag(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    job = TinyJob(tmp_path_factory.mktemp("rag"))
    job.write(pa.table({"q": [row[0] for row in ROWS], "doc": [row[1] for row in ROWS]}))
    return job


def overrides(folder: Path, template: str, *more: str) -> list[str]:
    path = folder / "template.jinja"
    path.write_text(template)
    return ["prompt.column=null", f"prompt.template_file={path}", "sink.keep_columns=[]", *more]


def advice(job: TinyJob, template: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert job.run("planned", *overrides(job.folder, template, "mode=plan", "order.columns=auto")).code == 0
    return capsys.readouterr().out.splitlines()[-1]


def test_the_gain_is_what_the_better_order_hits_more(rag: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    hits = []
    for name, template in (("question", QUESTION_FIRST), ("document", DOCUMENT_FIRST)):
        summary = rag.run(name, *overrides(rag.folder, template, "sampling.max_tokens=1")).summary
        hits.append(summary["cached_tokens"])
    gain, line = hits[1] - hits[0], advice(rag, QUESTION_FIRST, capsys)
    assert gain > 0
    assert f"in the order doc, q instead of q, doc, the cache would have about {gain:,} more of the" in line
    assert "of the first 40 rows" in line


def test_the_best_order_is_left_alone(rag: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no other order saves 1%" in advice(rag, DOCUMENT_FIRST, capsys)


def test_a_template_with_statements_is_not_judged(rag: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no advice" in advice(rag, "{% if q %}{{ q }}{% endif %} {{ doc }}", capsys)


def test_a_run_tells_the_advice_before_it_loads_weights_and_changes_nothing(
    rag: TinyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*overrides(rag.folder, QUESTION_FIRST), "source.limit=20", "sampling.max_tokens=2"]
    plain = rag.run("silent", *small).completions
    capsys.readouterr()
    assert rag.run("told", *small, "order.columns=auto").completions == plain
    messages = capsys.readouterr().err
    assert messages.index("order.columns: in the order doc, q") < messages.index("memory plan")


def test_without_a_template_the_advice_is_refused(rag: TinyJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert rag.run("refused", "prompt.column=q", "sink.keep_columns=[]", "order.columns=auto").code == 2
    assert "order.columns: 'auto'; accepted: null without a template" in capsys.readouterr().err


def test_no_rows_give_no_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = TinyJob(tmp_path)
    job.write(pa.table({"q": pa.array([], pa.string()), "doc": pa.array([], pa.string())}))
    assert "no other order saves" in advice(job, QUESTION_FIRST, capsys)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_hits_are_those_of_the_prompts_written_in_that_order(order: tuple[int, ...]) -> None:
    parts = split_template("Rules.\n{{ a }}\n{{ b }}\n{{ c }}\n")
    assert parts is not None
    tokenizer = tiny_tokenizer(chat=False)
    texts = [
        [
            each.render({"a": f"a{row % 2} " * 9, "b": f"b{row % 3} " * 7, "c": f"c{row} " * 3})
            for each in parts.sections
        ]
        for row in range(12)
    ]

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompts = [
        np.array([*ids(parts.head), *(token for at in order for token in ids(row[at])), *ids(parts.tail)], np.int32)
        for row in texts
    ]
    highest = highest_hit_tokens([prompts[at] for at in order_rows(prompts, "prefix")], 4)
    table = SectionTable(texts, parts, tokenizer)
    assert table.hit_tokens(order, 4) == highest
    assert table.prompt_tokens == sum(map(len, prompts))
