"""Why one row of the input cannot run."""

from __future__ import annotations


class RowProblem(Exception):
    """Makes the row an error row; the job goes on. The message says what is wrong and what to do."""
