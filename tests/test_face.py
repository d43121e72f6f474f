"""The first contact of users: mistyped flags, progress lines, printed thresholds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from checkpoints import write_checkpoint

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.benchmark import noise
from litspec.commands.lines import LogLines, loading
from litspec.jobs.prompts import Prompts
from litspec.report import Stats

JSON = ("--output_format", "json", "--max_new_tokens", "8")


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(list(argv))
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, expected",
    [
        (
            ["generate", "--promt", "hi"],
            "there is no flag --promt; did you mean --prompt? See `litspec generate --help`.",
        ),
        (["generate", "--promt=hi there"], "there is no flag --promt; did you mean --prompt?"),
        (["verify", "--seeed", "3"], "there is no flag --seeed; did you mean --seed?"),
        (["generate", "--xyzzy", "3"], "there is no flag --xyzzy. See"),
        (["generate", "--max_tokens", "3"], "there is no flag --max_tokens; did you mean --max_new_tokens?"),
        (["generate", "--num-speculative-tokens=3"], "did you mean --speculative_k?"),
        (["generate", "--device", "cuda"], "there is no flag --device; did you mean --accelerator?"),
        (["generate", "--n", "2"], "there is no flag --n; did you mean --num_samples?"),
        (["generate", "--config", "/nowhere.yaml"], "config '/nowhere.yaml' does not exist."),
        (["distill"], "See `litspec distill --help`."),
        (["distill"], "distill needs --"),
        (["generate", "hello"], "unexpected words hello;"),
        (["genrate"], "genrate is not a command; did you mean generate?"),
        (["generate", "--checkpoint_dir", "/nowhere", "--temperature", "-1"], "temperature must be"),
        (["generate", "--checkpoint_dir", "/nowhere", "--speculative_k", "9"], "speculative_k must be below"),
        (["chat", "--checkpoint_dir", "/nowhere", "--speculative_k", "9"], "speculative_k must be below"),
    ],
)
def test_a_typo_is_named_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], argv: list[str], expected: str
) -> None:
    assert expected in said(capsys, *argv)


def test_an_unknown_key_of_a_config_file_and_of_python_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("max_tokens: 3\n")
    told = said(capsys, "generate", "--config", str(tmp_path / "c.yaml"))
    assert "unknown key 'max_tokens'; did you mean max_new_tokens?" in told
    with pytest.raises(TypeError, match=r"SpecLLM.load\(\) .*'draft_model'; did you mean draft_dir\?"):
        SpecLLM.load(draft_model="x")


def test_a_log_gets_an_estimate_first_then_few_lines_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = LogLines("measuring", every=10, clock=lambda: now)
    for done in range(1, 101):
        now += 2.0
        lines.update(done, 100)
    found = capsys.readouterr().err.splitlines()
    assert found[0] == "measuring: 1 of 100 in 2 s, about 198 s left"
    assert found[-1] == "measuring: 100 of 100 in 200 s"
    assert len(found) == 11
    quiet = LogLines("measuring", quiet=True)
    quiet.update(1, 1)
    assert capsys.readouterr().err == ""


def test_without_proposals_acceptance_is_not_reported() -> None:
    assert "acceptance" not in Stats(new_tokens=3).summary()
    assert "acceptance rate 0.00 (0/4)" in Stats(new_tokens=3, proposed=4).summary()


@pytest.mark.slow
def test_verify_prints_its_thresholds_and_progress(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folders = [str(write_checkpoint(tmp_path / name, seed=seed)) for seed, name in enumerate(("target", "draft"))]
    with pytest.raises(SystemExit) as exit_:
        main(["verify", "--checkpoint_dir", folders[0], "--draft_dir", folders[1], "--quick", *JSON])
    out, err = capsys.readouterr()
    assert exit_.value.code == 0
    rule, honesty = json.loads(out)["checks"][-2:]
    assert "5,000 draws" in rule["detail"] and "fails below 1e-06" in rule["detail"]
    assert "4 contexts x 256 draws" in honesty["detail"]
    assert "fails below 2e-07, which is 1e-06 / 4 tests" in honesty["detail"]
    assert json.loads(out)["checks"][0]["detail"].startswith("2/2 texts equal")
    assert "verifying: 1 of " in err and "s left" in err


def test_loading_is_reported_if_it_takes_long(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lit_model.pth").write_bytes(bytes(200))
    with loading(tmp_path, after=0.01):
        time.sleep(0.2)
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"Loading {tmp_path} (0.0 GB) ..." and last.startswith("Loaded in ")
    with loading(tmp_path, after=60):
        pass
    monkeypatch.setenv("LOCAL_RANK", "1")
    with loading(tmp_path, after=0.01):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_bench_warns_of_a_busy_machine() -> None:
    assert noise([100.0, 104.0, 98.0], 0.8) == "" and noise([], 0.0) == ""
    assert "100.0 to 140.0 tokens/s in 3 equal turns. Measure" in noise([100.0, 140.0, 120.0], 0.8)
    assert "134% of the bandwidth of a copy" in noise([100.0], 1.34)
    both = noise([0.0, 10.0], 2.0)
    assert "0.0 to 10.0" in both and "200%" in both


def test_ids_that_several_prompts_have_are_found(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": "a"}, {"id": 2}, {}, {"id": "a"}, {"id": "b"}, {"id": 2}, {"id": "a"}]
    file.write_text("".join(json.dumps(line | {"prompt": "x"}) + "\n" for line in lines))
    # A prompt without an id has its index as id, so the third has id 2 too.
    assert Prompts(file, 3).repeated_ids() == ["a", 2]
    (tmp_path / "prompts.txt").write_text("x\nx\n")
    assert Prompts(tmp_path / "prompts.txt").repeated_ids() == []
