import errno
import json
import os
import resource
import subprocess
import sys

import pytest

from runner.storage import StorageError, install, make_folder, new_file, temporary, write_json


def test_json_is_replaced_whole_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": "ä"})
    assert json.loads(path.read_text()) == {"a": "ä"}
    assert os.listdir(tmp_path) == ["value.json"]


def test_a_file_is_hidden_until_it_is_installed(tmp_path):
    path = tmp_path / "file"
    with new_file(path) as file:
        file.write(b"abc")
    assert os.listdir(tmp_path) == [".file.tmp"]
    install(path)
    assert path.read_bytes() == b"abc"


def test_size_and_hash_are_those_of_the_file(tmp_path):
    with new_file(tmp_path / "file") as file:
        file.write(b"ab")
        file.write(memoryview(b"c"))
    assert file.size == 3
    assert file.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_an_error_while_writing_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="wrong"), new_file(tmp_path / "file"):
        raise ValueError("wrong")
    assert os.listdir(tmp_path) == []


def test_a_refusing_system_is_a_storage_error_with_path_and_reason(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="Not a directory") as caught:
        make_folder(tmp_path / "file" / "folder")
    assert caught.value.os_error.errno == errno.ENOTDIR
    assert caught.value.path == tmp_path / "file" / "folder"


def test_a_full_disk_is_a_storage_error_and_the_old_file_stays(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    # A limit on the size of files makes write() fail as a full disk does.
    child = "import sys, pathlib, runner.storage as s; s.write_json(pathlib.Path(sys.argv[1]), 'x' * 100000)"
    limited = subprocess.run(
        [sys.executable, "-c", child, str(path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert "StorageError" in limited.stderr
    assert "Make room" in limited.stderr
    assert json.loads(path.read_text()) == {"a": 1}
    assert not temporary(path).exists()
