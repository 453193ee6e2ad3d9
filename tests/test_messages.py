"""What happens to messages, and to the exit code, when standard error is closed, full or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.messages import say

CHECKOUT = Path(__file__).parents[1]

# Opens a file as a job would, and says something; 7 if the file got no number of a standard stream.
SPEAK = """
import os, sys
from runner.messages import drop_unwritten, open_streams, say
open_streams()
with open(sys.argv[1], "wb") as file:
    say("hello")
    number = file.fileno()
drop_unwritten()
sys.exit(7 if number > 2 else 1)
"""


def test_a_message_is_one_flushed_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say("the job is done")
    assert capsys.readouterr().err == "runner: the job is done\n"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "0<&- 1>&- 2>&-", "2> >(exit)"])
def test_a_stream_that_takes_nothing_costs_neither_the_work_nor_the_exit_code(redirection: str, tmp_path: Path) -> None:
    command = ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, "-c", SPEAK, str(tmp_path / "file")]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, capture_output=True, check=False)
    assert ended.returncode == 7
    assert (tmp_path / "file").read_bytes() == b""
    assert ended.stdout == b""
