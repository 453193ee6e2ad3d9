import re
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


def test_defaults_then_job_then_preset_then_command_line(tmp_path: Path) -> None:
    job = job_file(tmp_path, JOB.replace("max_tokens: 32", "max_tokens: 32, temperature: 0.3, stop: [x]"))
    for arguments in (["sampling=creative", "sampling.top_p=0.5"], ["sampling.top_p=0.5", "sampling='creative'"]):
        sampling = validate(compose_job(job, arguments, None)).sampling
        assert (sampling.top_k, sampling.temperature, sampling.top_p) == (0, 0.8, 0.5)
        assert (sampling.max_tokens, sampling.stop) == (32, ["x"]), "what the preset leaves alone stays the job's"
    greedy = compose_job(job, ["sampling=greedy"], None).sampling
    assert (greedy.temperature, greedy.max_tokens) == (0.0, 32)
    assert compose_job(job, [], None).sampling.temperature == 0.3


def test_a_job_file_may_choose_a_preset(tmp_path: Path) -> None:
    job = job_file(tmp_path, "defaults:\n  - override /sampling: creative\n" + JOB)
    assert compose_job(job, [], None).sampling.temperature == 0.8
    assert compose_job(job, ["sampling=greedy"], None).sampling.temperature == 0.0
    changed = JOB.replace("max_tokens: 32", "temperature: 0.3")
    job = job_file(tmp_path, "defaults: [override /sampling: creative]\n" + changed)
    assert (compose_job(job, [], None).sampling.temperature, compose_job(job, [], None).sampling.top_p) == (0.3, 0.95)


@pytest.mark.parametrize(
    "lines", ["sampling: creative", "defaults: [sampling: creative]", "defaults: [/sampling: creative]"]
)
def test_a_preset_chosen_in_a_way_that_is_none_is_answered_with_those_that_are(tmp_path: Path, lines: str) -> None:
    job = job_file(tmp_path, JOB.replace("sampling: {max_tokens: 32}", lines))
    with pytest.raises(ConfigError) as caught:
        compose_job(job, [], None)
    typed = re.search("`(.*)`", str(caught.value))
    assert typed is not None
    composed = compose_job(job_file(tmp_path, JOB + typed.group(1)), [], None)
    assert (composed.sampling.temperature, composed.sampling.max_tokens) == (0.8, 32)
    assert "sampling=creative" in str(caught.value)


def test_a_section_that_is_an_interpolation_is_no_preset(tmp_path: Path) -> None:
    job = job_file(tmp_path, JOB.replace("sampling: {max_tokens: 32}", "sampling: ${absent}"))
    with pytest.raises(ConfigError, match="Interpolation key 'absent' not found"):
        validate(compose_job(job, [], None))


def test_a_list_of_defaults_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="defaults: 3; accepted: a list"):
        compose_job(job_file(tmp_path, JOB + "defaults: 3"), [], None)


def test_presets_are_found_in_the_config_dir(tmp_path: Path) -> None:
    folder = tmp_path / "a, b = {c} 你"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "tiny.yaml").write_text("defaults: [default, _self_]\nkv_memory: 1MiB\n", encoding="utf-8")
    composed = compose_job(job_file(tmp_path), ["engine=tiny"], folder)
    assert composed.engine.kv_memory == "1MiB"
    assert composed.engine.block_size == 16


def test_a_preset_may_build_on_another(tmp_path: Path) -> None:
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling" / "wild.yaml").write_text("defaults: [creative, _self_]\ntop_k: 40\n")
    job = job_file(tmp_path, JOB.replace("max_tokens: 32", "max_tokens: 32, temperature: 0.3, top_k: 9"))
    sampling = compose_job(job, ["sampling=wild"], tmp_path).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.8, 0.95, 40, 32)


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
    with pytest.raises(ConfigError, match="creative, default, greedy"):
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
