"""`scripts/gpu_check.py` without a GPU: its tiny shapes hold, and each of its comparisons can fail."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
gpu_check = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_check)

SETUP = gpu_check.Setup(torch.device("cpu"), k=2, max_new_tokens=12)


@pytest.fixture(scope="module")
def model() -> Any:
    return gpu_check.near_tied_pair(SETUP, n_layer=2).placed.model


@pytest.mark.slow
def test_every_stage_runs_holds_and_has_numbers(tmp_path: Path) -> None:
    # With k = 1 there are fewest graphs to build.
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--k", "1", "--max_new_tokens", "24"]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "TINY SHAPES" in done.stdout and max(map(len, done.stdout.splitlines())) <= 120
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"] is True and set(found["stages"]) == {"1", "2", "3", "4"}
    names: set[str] = set()
    for stage in found["stages"].values():
        assert stage["failed"] is None and stage["left_out"] is None and stage["seconds"] > 0
        assert any("result" in row for row in stage["rows"])
        for row in stage["rows"]:
            names.add(row["name"])
            if "held" in row:
                assert row["held"] is True and row["comparisons"] > 0, row
                assert row["numbers"].get("proposed", 1) > 0, row
                assert row["numbers"].get("accepted", 1) > 0 or "draft_model" not in row["name"], row
            else:
                assert row["numbers"], row
                assert all(math.isfinite(value) and value > 0 for value in row["numbers"].values()), row
    assert names >= {f"bits, eager, {width} rows" for width in (1, 2, 4, 5, 8, 16)} | {"bits, compiled, 8 rows"}
    modes = ("eager, greedy", "eager, coupled", "compiled, greedy")
    drafters = ("draft_model", "prompt_lookup", "early_exit")
    assert names >= {f"text, {mode}, {drafter}" for mode in modes for drafter in drafters}
    for mode in ("eager", "compiled"):
        assert names >= {f"{mode}, k = 1, {right} right" for right in (0.6, 0.8, 0.9)}
        assert names >= {f"{mode}, plain", f"{mode}, share of bandwidth", f"{mode}, texts"}
    assert names >= {"litgpt, plain", "litgpt, k = 1", "litspec, plain", "litspec, k = 1", "2 devices, texts"}


@pytest.mark.parametrize("moved_by", [None, "place", "junk", "slots"])
@pytest.mark.parametrize("width", [2, 5])
def test_the_scan_finds_whatever_moves_a_row(model: Any, width: int, moved_by: str | None) -> None:
    def verify(idx: torch.Tensor, position: torch.Tensor, cache: Any, *, kv_length: int) -> torch.Tensor:
        logits = model.verify(idx, position, cache, kv_length=kv_length)
        noise = {
            None: torch.zeros(1),
            "place": torch.arange(width).view(-1, 1) / 16,
            "junk": idx[:, -1].view(1, 1) / 16,
            "slots": torch.tensor(kv_length / 16),
        }
        return logits + noise[moved_by].to(logits.dtype)

    stage = gpu_check.Stage("")
    gpu_check.check_bits(stage, "", model, verify, width, (61, 253))
    (row,) = stage.rows
    assert stage.held is (moved_by is None) and row["comparisons"] >= 10
    assert ("off by" in row["note"]) is (moved_by is not None)


def test_nothing_compared_is_not_held() -> None:
    stage = gpu_check.Stage("")
    stage.check("", True, 0, "")
    assert not stage.held


def test_a_text_that_a_drafter_changes_is_found(model: Any) -> None:
    llm = gpu_check.make_llm(model, model, SETUP.device)
    other = gpu_check.near_tied_pair(SETUP, n_layer=1)

    def with_drafter(name: str, **settings: Any) -> Any:
        return (other if name == "prompt_lookup" else llm).with_drafter(name, **settings)

    stage = gpu_check.Stage("")
    two_targets = SimpleNamespace(placed=llm.placed, with_drafter=with_drafter)
    gpu_check.check_texts(stage, "", two_targets, 2, max_new_tokens=8, temperature=0.0)
    assert [row["held"] for row in stage.rows if "held" in row] == [True, False, True]


def test_chains_of_ids_are_continued_as_often_as_asked() -> None:
    config = SETUP.config(gpu_check.DRAFT)
    ids = torch.arange(0, config.vocab_size, 7).view(1, -1)
    for right in (1.0, 0.8):
        model = gpu_check.build(
            gpu_check.GPT, config, gpu_check.random_weights(config, SETUP.device, seed=0, right=right)
        )
        followed = model(ids).argmax(-1) == (ids + gpu_check.STEP) % config.vocab_size
        assert followed.float().mean().item() == pytest.approx(right, abs=0.06)


@pytest.mark.slow
def test_a_stage_that_fails_or_lasts_too_long_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def fails(stage: Any, setup: Any) -> None:
        stage.number("before", "1", value=1.0)
        raise RuntimeError("out of [memory]")

    def holds(stage: Any, setup: Any) -> None:
        stage.check("a check", True, 3, "rows")

    def differs(stage: Any, setup: Any) -> None:
        stage.check("a check", False, 3, "rows")

    def run(*functions: Any) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu_check, "STAGES", {n: ("", function, 1) for n, function in enumerate(functions, 1)})
        monkeypatch.setattr(gpu_check, "TINY_PATIENCE", 1)
        stages = ",".join(str(n) for n in range(1, len(functions) + 1))
        flags = ["--device", "cpu", "--stages", stages, "--output", str(tmp_path / "found.json")]
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *flags])
        return gpu_check.main(), json.loads((tmp_path / "found.json").read_text())["stages"]

    code, stages = run(holds, fails, lambda stage, setup: time.sleep(30), holds)
    assert code == 0
    assert stages["2"]["failed"] == "RuntimeError: out of [memory]" and stages["2"]["rows"][0]["name"] == "before"
    assert stages["3"]["failed"] == "its 1 seconds were over" and stages["3"]["seconds"] < 10
    assert stages["4"]["rows"][0]["held"] is True
    assert "out of [memory]" in capsys.readouterr().out
    assert run(fails, holds)[0] == 1
    assert run(differs)[0] == 1
    assert run(holds, differs)[0] == 1
