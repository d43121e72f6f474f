"""Ranks start and end together: none waits forever, none remains, and the exit code is the documented one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import tiny_config, write_checkpoint

LIMIT = 150  # seconds, of which a machine that is busy takes many for imports


def start(folder: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    """A job on two ranks."""
    command = [sys.executable, "-m", "litspec", "generate", "--checkpoint_dir", "tiny", "--accelerator", "cpu"]
    command += ["--prompts_file", "in.txt", "--out_file", "out.jsonl", "--placement", "replicate", *flags]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"} | env, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "tiny", tiny_config(block_size=4096))
    (tmp_path / "in.txt").write_text("".join(f"prompt {i}\n" for i in range(40)))
    return tmp_path


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text() if Path(f"/proc/{pid}").exists() else ""
    return [int(child) for child in found.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = LIMIT) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists a process's children")


@pytest.mark.slow
@needs_proc
def test_a_rank_ends_with_the_process_that_started_it_from_its_first_moment(folder: Path) -> None:
    first = start(folder, "--devices", "2")
    try:
        wait_for(lambda: children(first.pid))
        (second,) = children(first.pid)
        first.kill()
        wait_for(lambda: not alive(second), 60)
    finally:
        first.kill()
        first.communicate()


@pytest.mark.slow
@needs_proc
def test_a_rank_that_is_killed_in_a_job_ends_it_with_2_and_a_sentence(folder: Path) -> None:
    first = start(folder, "--devices", "2", "--max_new_tokens", "3000", "--min_new_tokens", "3000")
    try:
        wait_for(lambda: list(folder.glob("out.jsonl.rank1-*.part")))
        (second,) = children(first.pid)
        os.kill(second, signal.SIGKILL)
        _, said = first.communicate(timeout=60)
        assert first.returncode == 2
        assert ("Traceback" not in said and "anks" in said) or "Rank 1" in said
    finally:
        first.kill()
        first.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "flags", "sentence"),
    [
        ({"LOCAL_RANK": "0"}, ("--devices", "2"), "LOCAL_RANK is '0'"),
        ({"LOCAL_RANK": "x"}, ("--devices", "2"), "LOCAL_RANK is 'x'"),
        ({"SLURM_NTASKS": "x"}, (), "SLURM_NTASKS is 'x'"),
        ({"MASTER_ADDR": "no such host"}, ("--devices", "2"), "MASTER_ADDR is 'no such host'"),
        ({}, ("--num_nodes", "2"), "num_nodes = 2 needs MASTER_ADDR"),
    ],
)
def test_what_would_wait_without_end_is_refused_at_once(
    env: dict[str, str], flags: tuple[str, ...], sentence: str, folder: Path
) -> None:
    process = start(folder, *flags, **env)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 2, said
    assert sentence in said and "Traceback" not in said


@pytest.mark.slow
@needs_proc
def test_a_port_in_use_is_refused_before_another_rank_is_started(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(folder, "--devices", "2", MASTER_PORT=str(port))
        _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 2, said
    assert str(port) in said and "Traceback" not in said
    assert not list(folder.glob("out.jsonl*"))


@pytest.mark.slow
def test_a_rank_that_waits_alone_says_so_and_ends_within_a_minute(folder: Path) -> None:
    port = str(free_port())
    process = start(folder, "--devices", "2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    began = time.monotonic()
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 2, said
    assert "Rank 1 is waiting for all 2 ranks" in said and "no process answers" in said and "Traceback" not in said
    assert time.monotonic() - began < LIMIT
