"""Folders of published drafters: each kind is found under draft_dir, and drafts for the target's own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import lively_weights, tiny_config, write_checkpoint
from heads import random_dflash, random_eagle, random_mtp, write_folder
from safetensors.torch import save_file

from litspec.__main__ import main
from litspec.drafters.folders import open_published
from litspec.errors import InputError

CONFIG = tiny_config(n_layer=4)


def write_kind(kind: str, folder: Path) -> Path:
    if kind == "dflash":
        return random_dflash(CONFIG, folder)
    config, weights = random_eagle(CONFIG, draft_vocab_size=64) if kind == "eagle3" else random_mtp(CONFIG, 3)
    return write_folder(folder, config, weights)


def generated(target: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[Any, str]:
    """The command's output for a greedy text, and its messages."""
    flags += ("--checkpoint_dir", str(target), "--prompt", "abc", "--max_new_tokens", "20", "--temperature", "0")
    with pytest.raises(SystemExit) as exit_:
        main(["generate", *flags, "--accelerator", "cpu", "--output_format", "json"])
    out, err = capsys.readouterr()
    assert exit_.value.code == 0, err
    return json.loads(out), err


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), CONFIG, weights=lively_weights(CONFIG))


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp"])
def test_each_kind_is_found_under_draft_dir_and_the_text_is_the_target_s(
    kind: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, _ = generated(target, capsys, "--drafter", "none")
    drafted, said = generated(target, capsys, "--draft_dir", str(write_kind(kind, tmp_path)), "--speculative_k", "3")
    assert f"Drafter: {kind}." in said
    assert drafted["token_ids"] == alone["token_ids"] and drafted["stats"]["proposed"] > 10


def test_mtp_layers_beside_the_target_s_own_checkpoint_draft_where_draft_dir_is_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path, CONFIG, weights=lively_weights(CONFIG))
    alone, _ = generated(folder, capsys, "--drafter", "none")
    config, weights = random_mtp(CONFIG, 1)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    drafted, said = generated(folder, capsys, "--draft_dir", str(folder), "--speculative_k", "3")
    assert "Drafter: mtp." in said
    assert drafted["token_ids"] == alone["token_ids"] and drafted["stats"]["proposed"] > 10


def test_an_index_says_which_file_holds_a_weight_and_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, {}, {"a": torch.ones(2)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "missing.safetensors"}}))
    published = open_published(tmp_path)
    assert published.read(["a"])["a"].tolist() == [1, 1]
    with pytest.raises(InputError, match=r"missing\.safetensors.* is missing, but the folder's index names it"):
        published.read()
    for wrong in ({"a": "../model.safetensors"}, {"a": "/etc/passwd"}, ["a"], None):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(InputError, match="is not an index of safetensors files"):
            open_published(tmp_path)
