"""`scripts/bench_growth.py` with short contexts: tests its output and plot, not its speed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")


@pytest.fixture
def bench(monkeypatch):
    """The script's `main`, called with flags."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import bench_growth

    def main(*flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["bench_growth.py", *flags])
        bench_growth.main()

    return main


@pytest.mark.slow
def test_every_context_has_positive_numbers_and_the_plot_is_a_picture(bench, capsys, tmp_path):
    picture = tmp_path / "growth.png"
    bench("--contexts", "600,64", "--repeats", "2", "--output_format", "json", "--plot", str(picture))
    report = json.loads(capsys.readouterr().out)

    assert [(row["width"], row["context"]) for row in report["rows"]] == [(1, 64), (1, 600), (8, 64), (8, 600)]
    for row in report["rows"]:
        # 2 layers, keys and values, 2 groups, heads of 32, 4 bytes; 600 positions are read as a bucket of 1,024.
        assert row["kv_bytes"] == 2 * 2 * 2 * 32 * 4 * {64: 64, 600: 1024}[row["context"]]
        assert set(row["seconds"]) == {"litgpt", "litspec", "attention"}
        for part in ("seconds", "tokens_per_second", "setup_bytes", "step_bytes"):
            assert {"litgpt", "litspec"} <= set(row[part])
            assert all(math.isfinite(value) and value > 0 for value in row[part].values()), (part, row)
        # LitGPT's mask, a byte for every pair of positions, is held twice while it is made.
        assert row["setup_bytes"]["litgpt"] >= 2 * row["context"] ** 2
    assert report["copy_bandwidth"] > 0
    assert [(line["width"], line["context"]) for line in report["growth"]] == [(1, 600), (8, 600)]
    for line in report["growth"]:
        assert line["copy_seconds"] == pytest.approx(line["kv_bytes"] / report["copy_bandwidth"])

    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and len(data) > 20_000


@pytest.mark.slow
def test_text_shows_tables_and_the_growth_between_two_contexts(bench, capsys):
    bench("--contexts", "64,128", "--repeats", "1")
    out = capsys.readouterr().out
    assert "Speed" in out and "Peak memory" in out and "Added since the first context" in out
    assert "1 row, 64 to 128 positions" in out and "8 rows, 64 to 128 positions" in out
    bench("--contexts", "64", "--repeats", "1")
    out = capsys.readouterr().out
    assert "Speed" in out and "Peak memory" in out and "Added" not in out and "positions:" not in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--contexts", "512,many"), "'512,many' is not a list of numbers of positions, such as 512,2048"),
        (("--contexts", ""), "'' is not a list of numbers of positions, such as 512,2048"),
        (("--contexts", "512,7"), "a context has 8 to 65,536 positions, not 7"),
        (("--contexts", "100000"), "a context has 8 to 65,536 positions, not 100,000"),
        (("--repeats", "0"), "needs at least one turn, not 0"),
        (("--plot", "nowhere/growth.png"), "'nowhere/growth.png' does not name a picture, such as .png, in a folder"),
        (("--plot", "growth.txt"), "'growth.txt' does not name a picture, such as .png, in a folder"),
    ],
)
def test_a_flag_that_cannot_be_followed_ends_in_a_sentence(bench, capsys, flags, sentence):
    with pytest.raises(SystemExit) as ended:
        bench(*flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {flags[0]}: {sentence}\n")
