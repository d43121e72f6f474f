"""A short run of scripts/torture.py, and checks that it detects faults."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "torture.py"


@pytest.fixture(scope="module")
def torture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["torture"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_nothing_is_lost_changed_or_left_by_a_few_kills_mutations_and_odd_lines() -> None:
    short = ["--kills", "2", "--prompts", "4", "--mutations", "9", "--lines", "10", "--full_disks", "0"]
    ended = subprocess.run([sys.executable, str(SCRIPT), *short], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in ended.stdout.splitlines()[2:]]
    assert sum(int(row[1]) for row in rows) == 2 + 9 + 10
    assert all(row[1] == row[2] and row[3:] == ["0"] * 4 for row in rows)


def test_a_traceback_a_hang_and_a_wrong_exit_are_each_counted(torture: ModuleType) -> None:
    row = torture.Row("some")
    row.note("fine", 2, "a sentence")
    row.note("odd", 1, "Traceback (most recent call last):\nValueError: x")
    row.note("slow", *torture.forked(lambda: time.sleep(60) or 0, 0.2))
    row.note("killed", *torture.forked(lambda: 77))
    assert (row.tried, row.survived, row.tracebacks, row.hangs, row.wrong_exits) == (4, 1, 1, 1, 1)
    assert "| some | 4 | 1 | 1 | 1 | 1 | 0 |" in torture.table([row])


def test_the_same_seed_gives_the_same_mutations(torture: ModuleType) -> None:
    made = [[torture.mutated(b"some: 1\nmore: 2\n", random.Random(seed)) for seed in range(50)] for _ in range(2)]
    assert made[0] == made[1] and len(set(made[0])) > 25
