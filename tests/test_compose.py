from pathlib import Path

import pytest

from runner.compose import compose_job
from runner.config import ConfigError
from runner.jobs import JobFile
from runner.validation import validate

JOB = """
source: {path: in.parquet}
prompt: {column: text}
model: {path: model}
sampling: {max_tokens: 32}
sink: {path: out}
"""


def job_file(folder: Path, text: str = JOB) -> JobFile:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return JobFile("mine", path)


def test_defaults_then_preset_then_job_then_command_line(tmp_path: Path) -> None:
    job = job_file(tmp_path)
    sampling = validate(compose_job(job, ["sampling=creative", "sampling.top_p=0.5"], None)).sampling
    assert (sampling.top_k, sampling.temperature, sampling.max_tokens, sampling.top_p) == (0, 0.8, 32, 0.5)


def test_a_job_file_may_choose_a_preset(tmp_path: Path) -> None:
    job = job_file(tmp_path, "defaults:\n  - override /sampling: creative\n" + JOB)
    assert compose_job(job, [], None).sampling.temperature == 0.8
    assert compose_job(job, ["sampling=greedy"], None).sampling.temperature == 0.0


def test_presets_are_found_in_the_config_dir(tmp_path: Path) -> None:
    folder = tmp_path / "a, b = {c} 你"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "tiny.yaml").write_text("defaults: [default, _self_]\nkv_memory: 1MiB\n", encoding="utf-8")
    composed = compose_job(job_file(tmp_path), ["engine=tiny"], folder)
    assert composed.engine.kv_memory == "1MiB"
    assert composed.engine.block_size == 16


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["prompt.chat_kwargs={enable_thinking: false}"], {"date": "today", "enable_thinking": False}),
        (["prompt.chat_kwargs.enable_thinking=false"], {"date": "today", "enable_thinking": False}),
        (["prompt.chat_kwargs={date: null, tools: [{name: a}]}"], {"date": None, "tools": [{"name": "a"}]}),
    ],
)
def test_arguments_of_the_chat_template_are_added_on_the_command_line(
    tmp_path: Path, arguments: list[str], expected: dict[str, object]
) -> None:
    job = job_file(tmp_path, JOB.replace("column: text", "column: text, chat_kwargs: {date: today}"))
    assert validate(compose_job(job, arguments, None)).prompt.chat_kwargs == expected


def test_an_unknown_preset_is_answered_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="creative, greedy"):
        compose_job(job_file(tmp_path), ["sampling=wild"], None)


def test_one_job_leaves_nothing_behind_for_the_next(tmp_path: Path) -> None:
    compose_job(job_file(tmp_path, JOB + "order: {by: input}\n"), [], None)
    assert compose_job(job_file(tmp_path), [], None).order.by == "prefix"


@pytest.mark.parametrize("text", ["a: [", "- a\n- b\n", "a: 1\na: 2\n"])
def test_a_file_that_is_no_mapping_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        compose_job(job_file(tmp_path, text), [], None)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"prompt: {system: caf\xe9}")
    with pytest.raises(ConfigError, match="a readable YAML file"):
        compose_job(JobFile("mine", path), [], None)
