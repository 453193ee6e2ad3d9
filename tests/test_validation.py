import copy
import math
from pathlib import Path
from typing import Any

import pytest

from runner.config import ConfigError, RunConfig
from runner.validation import validate

JOB: dict[str, Any] = {
    "source": {"path": "in.parquet"},
    "prompt": {"column": "text"},
    "model": {"path": "model"},
    "sink": {"path": "out"},
}


def job(**changes: Any) -> dict[str, Any]:
    """A valid job with some keys changed: `section__key=value`, or `key=value` at the top."""
    changed = copy.deepcopy(JOB)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            changed.setdefault(section, {})[key] = value
        else:
            changed[section] = value
    return changed


def refusal(**changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(job(**changes))
    return caught.value


def test_a_small_job_gets_the_defaults() -> None:
    config = validate(JOB)
    assert isinstance(config, RunConfig)
    assert config.sampling.max_tokens == 256
    assert config.sampling.temperature == 0.0
    assert config.prompt.column == "text"
    assert config.engine.max_seqs is None


def test_a_single_stop_text_is_a_list_of_one() -> None:
    assert validate(job(sampling__stop="\n\n")).sampling.stop == ["\n\n"]


def test_numbers_are_taken_where_a_text_holds_one() -> None:
    config = validate(job(sink__commit_every=500, engine__kv_memory=4096))
    assert config.sink.commit_interval.rows == 500
    assert config.engine.kv_memory_bytes == 4096


def test_a_whole_number_above_2_to_the_53_stays_exact() -> None:
    assert validate(job(sampling__seed=2**53 + 1)).sampling.seed == 2**53 + 1


@pytest.mark.parametrize(
    ("section", "key", "value", "accepted"),
    [
        ("source", "format", "csv", "auto, parquet, jsonl, dataset"),
        ("source", "limit", -1, "0 or more"),
        ("source", "skip", -1, "0 or more"),
        ("source", "path", "", "not empty"),
        ("source", "path", ["a", "b"], "text"),
        ("prompt", "chat", "maybe", "auto, always, never"),
        ("prompt", "on_too_long", "skip", "error, truncate_left, truncate_right"),
        ("prompt", "special_tokens", 1, "true or false"),
        ("prompt", "chat_kwargs", {"a": [math.inf]}, "finite"),
        ("model", "dtype", "fp8", "auto, float32, bfloat16, float16"),
        ("engine", "device", "gpu", "auto, cpu, cuda"),
        ("engine", "block_size", 8, "16, 32, 64, 128, 256"),
        ("sampling", "n", 0, "from 1 to"),
        ("sampling", "n", 1.5, "a whole number"),
        ("sampling", "n", 65_537, "engine.max_seqs at most"),
        ("order", "columns", "best", "auto"),
        ("engine", "block_size", 48, "16, 32, 64, 128, 256"),
        ("engine", "kv_memory", "lots", "GiB"),
        ("engine", "device", "cuda:99999999999", "a device number N below 100"),
        ("engine", "device", "cuda:٣", "cuda:N"),
        ("engine", "max_seqs", 0, "from 1 to 65,536 (each takes memory"),
        ("engine", "max_seqs", 10**9, "from 1 to 65,536 (each takes memory"),
        ("engine", "max_batch_tokens", 0, "from 1"),
        ("engine", "max_batch_tokens", 2**20 + 1, "to 1,048,576 (each takes memory"),
        ("engine", "max_model_len", 1, "from 2"),
        ("engine", "max_model_len", 2**31, "to 2,147,483,647"),
        ("engine", "prefix_cache", "sometimes", "true or false"),
        ("sampling", "temperature", -0.1, "0 (greedy), or a number from 1e-06 to 1,000,000"),
        ("sampling", "temperature", 1e-7, "from 1e-06"),
        ("sampling", "temperature", 1e39, "to 1,000,000"),
        ("sampling", "temperature", math.nan, "finite"),
        ("sampling", "temperature", "nan", "finite"),
        ("sampling", "temperature", math.inf, "finite"),
        ("sampling", "temperature", True, "a number"),
        ("sampling", "top_p", 0.0, "above 0"),
        ("sampling", "top_p", 1.01, "up to 1"),
        ("sampling", "top_k", -1, "from 0"),
        ("sampling", "top_k", 3_000_000_000, "to 2,147,483,647"),
        ("sampling", "min_p", 1.5, "from 0"),
        ("sampling", "max_tokens", 0, "1 or more"),
        ("sampling", "max_tokens", 1.5, "a whole number"),
        ("sampling", "max_tokens", True, "a whole number"),
        ("sampling", "max_tokens", None, "a whole number"),
        ("sampling", "max_tokens", "many", "a whole number"),
        ("sampling", "min_tokens", 257, "sampling.max_tokens=256"),
        ("sampling", "stop", ["a", ""], "not empty"),
        ("sampling", "stop", ["a", None], "a list of texts"),
        ("sampling", "stop", [["a"]], "a list of texts"),
        ("sampling", "stop", [{"a": "b"}], "a list of texts"),
        ("sampling", "stop", [1000.0, True], "in quotes"),
        ("sampling", "stop_token_ids", [-1], "0 or more"),
        ("sampling", "stop_token_ids", ["a"], "a list of whole numbers"),
        ("sampling", "stop_token_ids", [[1]], "a list of whole numbers"),
        ("sampling", "stop_token_ids", [True], "a list of whole numbers"),
        ("sampling", "seed", 2**63, "64 bits"),
        ("engine", "cuda_graphs", "yes", "auto, true, false"),
        ("engine", "cuda_graphs", None, "auto, true, false"),
        ("order", "by", "random", "prefix, input, longest"),
        ("order", "window", "0", "positive"),
        ("sink", "rows_per_part", 0, "1 or more"),
        ("sink", "commit_every", "soon", "60s"),
        ("sink", "compression", "rar", "zstd"),
        ("sink", "keep_columns", ["a", "a"], "each once"),
        ("sink", "keep_columns", [["a"]], "a list of texts"),
        ("sink", "keep_columns", ["\ud800"], "UTF-8"),
        ("sink", "path", "s3://bucket/out", "a local folder"),
        ("sink", "path", "file:///out", "a local folder"),
        ("sink", "path", "a\0b", "NUL"),
        ("sink", "path", "x" * 300, "a local folder, new or existing: File name too long"),
        ("sink", "path", "~no_such_user/out", "no user's home folder"),
        ("prompt", "chat_kwargs", {"a": {1: "b"}}, "names"),
        ("prompt", "chat_kwargs", {"a": b"bytes"}, "names"),
        ("prompt", "system", "\ud800", "UTF-8"),
        ("sink", "order", "random", "input, completion"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_accepted(section: str, key: str, value: object, accepted: str) -> None:
    error = refusal(**{f"{section}__{key}": value})
    assert error.key == f"{section}.{key}"
    assert accepted in error.accepted
    assert repr(value) in str(error) or value is None or key == "temperature"


@pytest.mark.parametrize("key", ["source", "model", "sink"])
def test_a_required_path_is_asked_for(key: str) -> None:
    error = refusal(**{key: {}})
    assert error.key == f"{key}.path"
    assert error.value is None


def test_unknown_keys_are_refused_wherever_they_are() -> None:
    assert refusal(sampling__temprature=1).key == "sampling.temprature"
    assert "sampling.temperature perhaps" in refusal(sampling__temprature=1).accepted
    assert refusal(shard={"index": 0}).key == "shard"


def test_a_section_that_is_no_mapping_is_refused() -> None:
    assert refusal(engine=3).key == "engine"
    assert "a section with the keys sink.path" in refusal(sink=["out"]).accepted


def test_an_interpolation_resolves_or_is_refused() -> None:
    assert validate(job(prompt__system="${sink.path}")).prompt.system == "out"
    assert "prompt.template_file" in refusal(prompt__system="costs ${price}").accepted
    assert refusal(prompt__system="${").key == "prompt.system"


def test_exactly_one_prompt_source_is_accepted() -> None:
    assert refusal(prompt={}).key == "prompt"
    error = refusal(prompt__template="{{ text }}", prompt__template_file="prompt.jinja")
    assert error.key == "prompt.column and prompt.template and prompt.template_file"


@pytest.mark.parametrize(
    ("prompt", "sink", "key"),
    [
        ({"column": "a", "chat": "never", "chat_kwargs": {"x": 1}}, {}, "prompt.chat_kwargs"),
        ({"column": "a", "chat": "never", "system": "be brief"}, {}, "prompt.system"),
        ({"messages_column": "a", "chat": "never"}, {}, "prompt.chat"),
        ({"token_ids_column": "a", "chat": "always"}, {}, "prompt.chat"),
        ({"token_ids_column": "a", "chat_kwargs": {"x": 1}}, {}, "prompt.chat_kwargs"),
        ({"token_ids_column": "a", "system": "be brief"}, {}, "prompt.system"),
        ({"token_ids_column": "a"}, {"keep_prompt": True}, "sink.keep_prompt"),
    ],
)
def test_keys_that_cannot_go_together_are_refused(prompt: dict[str, Any], sink: dict[str, Any], key: str) -> None:
    assert refusal(prompt=prompt, sink={"path": "out", **sink}).key == key


def test_package_paths_are_resolved() -> None:
    config = validate(job(source__path="package://jobs/demo/support.parquet"))
    assert Path(config.source.path).is_file()
    error = refusal(model__path="package://no_such_package/model")
    assert error.key == "model.path"
    assert "pip install no-such-package" in error.accepted


def test_a_tilde_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompt.jinja").write_text("{{ text }}")
    config = validate(
        {
            "source": {"path": "~/rows/*.parquet"},
            "prompt": {"template_file": "~/prompt.jinja"},
            "model": {"path": "~/model", "tokenizer": "~/tokenizer"},
            "sink": {"path": "~/out"},
        }
    )
    paths = [config.source.path, config.prompt.template_file, config.model.path, config.model.tokenizer]
    assert paths == [f"{tmp_path}/{name}" for name in ("rows/*.parquet", "prompt.jinja", "model", "tokenizer")]
    assert config.sink.path == f"{tmp_path}/out"


@pytest.mark.parametrize(("name", "reason"), [("file", "a file"), ("file/out", "Not a direct"), ("link", "a link to")])
def test_an_output_folder_that_cannot_be_one_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    error = refusal(sink__path=str(tmp_path / name))
    assert error.key == "sink.path"
    assert "a local folder, new or existing" in error.accepted
    assert reason in error.accepted


def test_an_output_folder_may_exist_or_not(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new" / "out"):
        assert validate(job(sink__path=str(path))).sink.path == str(path)


@pytest.mark.parametrize("temperature", [0, 1e-6, 0.7, 1e6])
def test_temperatures_that_float32_can_divide_by_are_accepted(temperature: float) -> None:
    assert validate(job(sampling__temperature=temperature)).sampling.temperature == temperature


def test_a_template_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin1.jinja").write_bytes(b"caf\xe9")
    for name in ("missing.jinja", "latin1.jinja"):
        error = refusal(prompt={"template_file": str(tmp_path / name)})
        assert error.key == "prompt.template_file"
        assert "readable UTF-8" in error.accepted
