"""What `scripts/studio_job.py` would submit, held against the real signature of lightning-sdk, without a network."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

# Importing the sdk asks a package index for its newest version, unless it is told not to.
os.environ.setdefault("LIGHTNING_DISABLE_VERSION_CHECK", "1")
lightning_sdk = pytest.importorskip("lightning_sdk")

SCRIPT = Path(__file__).parents[1] / "scripts" / "studio_job.py"
FLAGS = ["--config", "litspec/config_hub/generate/llama-3.1-8b.yaml", "--prompts_file", "my prompts.jsonl"]
OUT = ["--out_file", "answers.jsonl"]

spec = importlib.util.spec_from_file_location("studio_job", SCRIPT)
studio_job = importlib.util.module_from_spec(spec)
spec.loader.exec_module(studio_job)


def run_alone(prelude: str, *args: str, home: Path) -> subprocess.CompletedProcess:
    """Runs the script in a separate process, after `prelude`, for a user who is not logged in."""
    code = f"{prelude}\nimport runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTNING_")} | {"HOME": str(home)}
    command = [sys.executable, "-c", code, str(SCRIPT), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def dry_run(capsys, *args: str, flags: list[str] = FLAGS + OUT) -> dict:
    assert studio_job.main([*args, "--dry_run", "--", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *args: str, flags: list[str] = FLAGS + OUT) -> str:
    """The sentence of a run that must end with 2 and submit nothing."""
    with mock.patch.object(lightning_sdk.Job, "run") as submitted:
        # Replacing `run` hides its signature, but these errors are raised before that.
        submitted.__signature__ = inspect.signature(lightning_sdk.Job.run)
        assert studio_job.main([*args, "--", *flags]) == 2
    assert not submitted.called
    sentence = capsys.readouterr().err
    assert sentence.startswith("error: ") and sentence.count("\n") == 1
    return sentence


def test_a_dry_run_prints_arguments_that_job_run_takes_and_touches_no_network(tmp_path):
    forbid = (
        "import socket\n"
        "def refuse(*a, **k): raise SystemExit('the network was touched')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse"
    )
    settings = ["--name", "answers-1", "--machine", "L40S", "--studio", "herd", "--teamspace", "pasture"]
    done = run_alone(
        forbid, *settings, "--org", "farm", "--interruptible", "--dry_run", "--", *FLAGS, *OUT, home=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    arguments = json.loads(done.stdout)
    assert arguments == {
        "name": "answers-1",
        "machine": lightning_sdk.Machine.L40S.slug,
        "command": "litspec generate --config litspec/config_hub/generate/llama-3.1-8b.yaml"
        " --prompts_file 'my prompts.jsonl' --out_file answers.jsonl",
        "studio": "herd",
        "teamspace": "pasture",
        "org": "farm",
        "interruptible": True,
    }
    inspect.signature(lightning_sdk.Job.run).bind(**arguments)


def test_a_submission_hands_job_run_what_the_dry_run_printed(capsys):
    settings = ["--name", "answers-1", "--machine", "H100_X_4", "--studio", "herd", "--user", "llama"]
    printed = dry_run(capsys, *settings)
    job = SimpleNamespace(name="answers-1", link="https://lightning.ai/llama/pasture/jobs/answers-1")
    with mock.patch.object(lightning_sdk.Job, "run", autospec=True, return_value=job) as submitted:
        assert studio_job.main([*settings, "--", *FLAGS, *OUT]) == 0
    submitted.assert_called_once_with(**printed)
    output = capsys.readouterr()
    assert output.out == job.link + "\n" and "/teamspace/jobs/answers-1" in output.err


def test_what_lightning_refuses_ends_with_one_line_and_status_1(capsys):
    error = ValueError("Studio 'herd' does not exist.\nHTTP response headers: ...")
    with mock.patch.object(lightning_sdk.Job, "run", autospec=True, side_effect=error):
        assert studio_job.main(["--name", "a", "--machine", "L4", "--", *FLAGS, *OUT]) == 1
    assert capsys.readouterr().err == "error: Lightning did not take the job: Studio 'herd' does not exist.\n"


@pytest.mark.parametrize(
    "prompt",
    [
        "What do llamas eat?",
        'it\'s $HOME, `date` and "quotes"',
        "two\nlines\t*",
        "--",
        "",
        "-- Ünïcødé 🦙 \\ !",
        "a=b;c&d|e",
    ],
)
def test_a_shell_hands_the_command_every_flag_unchanged(prompt, capsys, tmp_path):
    command = dry_run(capsys, "--name", "a", "--machine", "L4", flags=["--prompt", prompt, "--stop", "\n\n"])["command"]
    assert run_command(command, tmp_path) == (0, ["generate", "--prompt", prompt, "--stop", "\n\n"])


def run_command(command: str, home: Path) -> tuple[int, list[str]]:
    """Run as a job of a Studio does (bash, -e, in the home folder), with a `litspec` that notes what it was given."""
    program = home / "bin" / "litspec"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"""#!/bin/sh\nfor word; do printf '%s\\0' "$word"; done > {shlex.quote(str(home))}/words\n""")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    status = subprocess.run(["bash", "-e", "-c", command], cwd=home, env=environment, capture_output=True).returncode
    words = home / "words"
    return status, words.read_text(encoding="utf-8").split("\0")[:-1] if words.exists() else []


@pytest.mark.parametrize(
    "out_file", ["answers.jsonl", "results/my answers.jsonl", studio_job.STUDIO_HOME + "/answers.jsonl"]
)
def test_resuming_fetches_what_the_earlier_job_left_before_it_goes_on(out_file, tmp_path, monkeypatch):
    home, jobs = tmp_path / "home", tmp_path / "jobs of a team"
    monkeypatch.setattr(studio_job, "JOB_FILES", str(jobs))
    inside = out_file.removeprefix(studio_job.STUDIO_HOME + "/")
    left = jobs / "answers-1" / inside
    left.parent.mkdir(parents=True)
    home.mkdir()
    for end in ("", ".stats.jsonl", ".job.json"):
        Path(f"{left}{end}").write_text(f"left{end}")
    (left.parent / "other.jsonl").write_text("none of this job's")

    flags = ["--prompts_file", "prompts.jsonl", "--out_file", out_file]
    command = studio_job.build_command(flags, resume_from="answers-1")
    assert run_command(command, home) == (0, ["generate", *flags])
    fetched = {
        path.name: path.read_text() for path in (home / inside).parent.iterdir() if path.suffix in (".jsonl", ".json")
    }
    assert fetched == {left.name + end: f"left{end}" for end in ("", ".stats.jsonl", ".job.json")}


def test_resuming_from_a_job_that_left_nothing_fails_instead_of_starting_again(tmp_path, monkeypatch):
    monkeypatch.setattr(studio_job, "JOB_FILES", str(tmp_path / "jobs"))
    status, words = run_command(studio_job.build_command(FLAGS + OUT, resume_from="answers-1"), tmp_path)
    assert status != 0 and words == []


def test_resuming_needs_an_out_file_that_a_job_keeps_in_its_home(capsys):
    resume = ["--name", "answers-2", "--machine", "L4", "--resume_from", "answers-1"]
    assert "--out_file" in refusal(capsys, *resume, flags=FLAGS)
    for outside in ("/teamspace/uploads/answers.jsonl", "../answers.jsonl"):
        sentence = refusal(capsys, *resume, flags=[*FLAGS, f"--out_file={outside}"])
        assert outside in sentence and "without --resume_from" in sentence


@pytest.mark.parametrize("flags", [FLAGS, ["--prompts_file=prompts.jsonl"]])
def test_many_prompts_without_an_out_file_are_warned_of(flags, capsys):
    assert studio_job.main(["--name", "a", "--machine", "L4", "--dry_run", "--", *flags]) == 0
    output = capsys.readouterr()
    assert output.err.startswith("warning: --prompts_file without --out_file") and "answers.jsonl" in output.err
    assert json.loads(output.out)["command"] == shlex.join(["litspec", "generate", *flags])


@pytest.mark.parametrize(
    ("flags", "interruptible", "warned"),
    [
        (FLAGS + OUT, False, None),
        (FLAGS + OUT, True, None),
        ([*FLAGS, "--out_file=answers.jsonl"], True, None),
        (["--prompt", "hi"], False, None),
        (["--prompt", "hi"], True, "--interruptible without"),
        ([*FLAGS, "--out_file", "/tmp/answers.jsonl"], False, "/tmp/answers.jsonl lies outside"),
        ([*FLAGS, "--out_file", "/teamspace/uploads/answers.jsonl"], False, None),
    ],
)
def test_warnings_are_for_what_would_be_lost_and_for_nothing_else(flags, interruptible, warned):
    warnings = studio_job.check_flags(flags, interruptible)
    assert [warned in warning for warning in warnings] == ([] if warned is None else [True])


def test_every_machine_of_the_sdk_is_known_by_name_in_any_case_and_by_slug():
    machines = {k: m for k, m in vars(lightning_sdk.Machine).items() if isinstance(m, lightning_sdk.Machine)}
    assert len(machines) > 30
    for name, machine in machines.items():
        for spelling in (name, name.lower(), machine.slug):
            assert studio_job.find_machine(spelling, lightning_sdk.Machine) == machine.slug


@pytest.mark.parametrize(
    ("typed", "meant"), [("L40", "L40S"), ("H100x4", "H100_X_4"), ("A10", "A100"), ("cpusmall", "CPU_SMALL")]
)
def test_an_unknown_machine_is_refused_with_close_names(typed, meant, capsys):
    sentence = refusal(capsys, "--name", "a", "--machine", typed)
    assert typed in sentence and meant in sentence.partition("it knows")[2].strip(" .\n").split(", ")


def test_without_the_sdk_the_extra_to_install_is_named(tmp_path):
    for switch in (["--dry_run"], []):
        hide = "import sys\nsys.modules['lightning_sdk'] = None"
        done = run_alone(hide, "--name", "a", "--machine", "L4", *switch, "--", *FLAGS, *OUT, home=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "pip install 'litspec[studio]'" in done.stderr and "Traceback" not in done.stderr
    project = (SCRIPT.parents[1] / "pyproject.toml").read_text()
    assert 'studio = ["lightning-sdk' in project


def test_an_sdk_without_one_of_the_arguments_is_told_apart_from_a_wrong_flag(capsys, monkeypatch):
    class OldJob:
        @classmethod
        def run(cls, name, machine, command=None, studio=None, interruptible=False): ...

    monkeypatch.setattr(studio_job, "import_sdk", lambda: (OldJob, lightning_sdk.Machine))
    assert studio_job.main(["--name", "a", "--machine", "L4", "--teamspace", "pasture", "--", *FLAGS, *OUT]) == 2
    sentence = capsys.readouterr().err
    assert "'teamspace'" in sentence and "pip install -U lightning-sdk" in sentence


def test_settings_that_contradict_or_lack_something_end_with_2(capsys):
    assert "after `--`" in refusal(capsys, "--name", "a", "--machine", "L4", flags=[])
    assert "exclude each other" in refusal(capsys, "--name", "a", "--machine", "L4", "--org", "x", "--user", "y")
    assert "--name is empty" in refusal(capsys, "--name", " ", "--machine", "L4")
    for args in (["--name", "a"], ["--name", "a", "--machine", "L4", "--prompts_file", "p"]):
        with pytest.raises(SystemExit, match="2"):
            studio_job.main([*args, "--", *FLAGS])
