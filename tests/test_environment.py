from pathlib import Path

import pytest
from transformers.utils.import_utils import is_kernels_available

from runner.environment import UnusableEnvironmentError, check_environment


def test_transformers_does_not_take_our_kernels_for_the_hub_package() -> None:
    is_kernels_available.cache_clear()
    assert not is_kernels_available()


def test_an_environment_without_the_hub_package_is_accepted() -> None:
    check_environment()


def test_an_environment_with_the_hub_package_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels-0.18.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnusableEnvironmentError, match=r"'kernels' 0\.18\.2 is installed.*pip uninstall kernels"):
        check_environment()
