"""Malicious files, links and settings give an error, and nothing is run, followed, overwritten or built."""

from __future__ import annotations

import json
import os
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import random_weights, tiny_config, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from litspec import SpecLLM
from litspec.checkpoint import load_weights, open_checkpoint
from litspec.errors import InputError, printable
from litspec.jobs import files, run_job
from litspec.jobs.deciding import checkpoint_digest
from litspec.jobs.disk import as_line
from litspec.model import GPT
from litspec.placement import place
from litspec.text import TextCodec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def job(folder: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs a job of three prompts on o.jsonl."""
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    load = {"checkpoint_dir": str(folder), "accelerator": "cpu", "drafter": "none"}

    def start(out: str = "o.jsonl", prompts: str = "in.txt") -> int:
        return run_job(tmp_path / prompts, tmp_path / out, load=load, max_new_tokens=3, temperature=0.0)

    return start


# --- files beside the out file ----------------------------------------------------------------------------------------

BESIDE = ["o.jsonl.lock", "o.jsonl.job.json", "o.jsonl.stats.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder", "text"])
def test_what_lies_beside_the_out_file_and_is_no_jobs_is_refused_and_left_alone(
    name: str, kind: str, job: Callable[..., int], tmp_path: Path
) -> None:
    precious, path = tmp_path / "precious", tmp_path / name
    precious.write_bytes(b"precious\n")
    if name != BESIDE[1]:
        assert job() == 0
        (tmp_path / "o.jsonl").unlink()  # the remaining files are the start of a job
    path.unlink(missing_ok=True)
    make = {"link": lambda: path.symlink_to(precious), "link to nothing": lambda: path.symlink_to(tmp_path / "new")}
    make |= {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "text": lambda: path.write_bytes(b"precious\n")}
    make[kind]()
    before = os.lstat(path)
    with pytest.raises(InputError, match=name):
        job()
    assert os.path.samestat(os.lstat(path), before) and os.lstat(path).st_mode == before.st_mode
    assert precious.read_bytes() == b"precious\n" and not (tmp_path / "new").exists()
    assert kind != "text" or path.read_bytes() == b"precious\n"
    assert not (tmp_path / "o.jsonl").exists()


def test_no_name_beside_the_out_file_is_guessed_overwritten_or_removed(job: Callable[..., int], tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious\n")
    (tmp_path / "o.jsonl.job.json.tmp").symlink_to(precious)
    (tmp_path / "o.jsonl.rank7-0.part").symlink_to(precious)
    mine = {"o.jsonl.rank-important.part", "o.jsonl.rank0-0.part", f"o.jsonl.job.json.{'0' * 16}.tmp"}
    for name in mine:
        (tmp_path / name).write_bytes(b"precious\n")
    assert job() == 0
    assert job() == 0
    assert all((tmp_path / name).read_bytes() == b"precious\n" for name in (*mine, "precious"))
    assert os.path.islink(tmp_path / "o.jsonl.job.json.tmp") and os.path.islink(tmp_path / "o.jsonl.rank7-0.part")


def test_what_a_killed_run_left_is_taken_away(job: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / f"o.jsonl.job.json.{'a' * 16}.tmp").write_bytes(b'{\n  "form')
    (tmp_path / "o.jsonl.lock").write_bytes(b"process 12 on elsewhere")
    (tmp_path / "o.jsonl.rank0-0.part").write_bytes(b'{"job": 12}\n')
    assert job() == 0
    assert sorted(path.name for path in tmp_path.glob("o.jsonl*")) == ["o.jsonl", *BESIDE[1:], "o.jsonl.summary.json"]


def test_an_out_file_that_no_job_wrote_is_not_cut_off(job: Callable[..., int], tmp_path: Path) -> None:
    assert job() == 0
    (tmp_path / "o.jsonl").write_bytes(b"my notes, without a newline")
    with pytest.raises(InputError, match="not written by a job"):
        job()
    assert (tmp_path / "o.jsonl").read_bytes() == b"my notes, without a newline"


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.rename("moved")])
def test_an_out_file_that_goes_or_changes_in_the_middle_is_noticed(
    change: Callable[[Path], Any],
    job: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    put = files.Results.put

    def put_and_change(self: files.Results, answer: files.Answer) -> dict[str, Any]:
        found = put(self, answer)
        if answer.number == 2:  # the last one
            change(tmp_path / "o.jsonl")
        return found

    monkeypatch.setattr(files.Results, "put", put_and_change)
    with pytest.raises(InputError, match=r"o\.jsonl' was (removed|changed).*same command again"):
        job()
    monkeypatch.undo()
    assert job() == 0
    assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 3


def test_prompts_from_a_pipe_are_refused(job: Callable[..., int], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        job(prompts="pipe.jsonl")


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"format": 1, "decides": null, "made_with": {}}', "[]", "null", "", "\0\0", "é"]
)
def test_an_odd_description_is_refused_with_a_sentence(content: str, job: Callable[..., int], tmp_path: Path) -> None:
    assert job() == 0
    (tmp_path / "o.jsonl.job.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match="does not describe a job"):
        job()


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX permissions")
@pytest.mark.parametrize("name", ["o.jsonl", *BESIDE[1:]])
def test_a_file_that_may_not_be_read_is_named(
    name: str, job: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job() == 0
    opened = os.open

    def refusing(path: Any, *rest: Any) -> int:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refusing)  # permissions do not apply to root
    with pytest.raises(InputError, match=f"{name}' cannot be read: Permission denied"):
        job()


def test_a_line_that_can_be_read_but_not_written_is_one_lines_error(job: Callable[..., int], tmp_path: Path) -> None:
    lines = [b'{"prompt": "one"}']
    for depth in range(100, 2000, 100):
        lines.append(b'{"prompt": "two", "stop": ' + b"[" * depth + b"]" * depth + b"}")
    (tmp_path / "deep.jsonl").write_bytes(b"\n".join(lines))
    assert job(prompts="deep.jsonl") == 1
    found = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert ["error" in line for line in found] == [False] + [True] * (len(lines) - 1)


def test_damage_in_the_archives_directory_gives_a_sentence_or_a_digest(folder: Path) -> None:
    path = folder / "lit_model.pth"
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        begin = archive.start_dir
    generator = torch.Generator().manual_seed(0)
    checkpoint = open_checkpoint(folder)
    refused = 0
    for _ in range(200):
        at = int(torch.randint(begin, len(content), (), generator=generator))
        spoiled = bytearray(content)
        spoiled[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        path.write_bytes(spoiled)
        try:
            checkpoint_digest(checkpoint)
        except InputError as error:
            assert "lit_model.pth" in str(error)
            refused += 1
    assert refused > 10


# --- prompt_style.yaml ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["sys.exit", "os.abort", "http.server.test", "evil.Style", "builtins.print", "exit", ""]
)
def test_no_code_that_a_folder_names_is_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Style: pass\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", str(folder), *sys.path])
    (folder / "prompt_style.yaml").write_text(yaml.safe_dump({"class_path": name}))
    with pytest.raises(InputError, match=r"prompt_style\.yaml"):
        TextCodec(folder, tiny_config())
    assert "evil" not in sys.modules and not (folder / "ran").exists()
    with pytest.raises(InputError, match=r"prompt_style\.yaml"):
        TextCodec(folder, tiny_config(), trust_prompt_style=True)
    assert "evil" not in sys.modules and not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["Path", "Config", "model_name_to_prompt_style", "nothing", "load_prompt_style"])
def test_only_a_style_among_litgpts_names_is_one(name: str, folder: Path) -> None:
    (folder / "prompt_style.yaml").write_text(f"class_path: litgpt.prompts.{name}\n")
    with pytest.raises(InputError, match="not a subclass"):
        TextCodec(folder, tiny_config())


def test_a_style_of_the_users_own_is_loaded_where_it_is_allowed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from litgpt.prompts import PromptStyle\nclass Loud(PromptStyle):\n"
    source += "    def apply(self, prompt, **_):\n        return prompt.upper()\n"
    (tmp_path / "my_own_styles.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    (folder / "prompt_style.yaml").write_text("class_path: my_own_styles.Loud\n")
    with pytest.raises(InputError, match="trust_prompt_style"):
        TextCodec(folder, tiny_config())
    llm = SpecLLM.load(folder, accelerator="cpu", drafter="none", trust_prompt_style=True)
    assert llm.codec.encode("abc").tolist() == llm.codec.tokenizer.encode("ABC").tolist()


# --- sizes, tensors, links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_layer", 10**9),
        ("n_embd", 10**9),
        ("padded_vocab_size", 10**11),
        ("block_size", 10**12 - 1),
        ("intermediate_size", -4),
        ("intermediate_size", 10**11),
        ("padding_multiple", 0),
        ("n_expert", -1),
        ("rope_condense_ratio", 0),
        ("rotary_percentage", float("nan")),
        ("rotary_percentage", 1e9),
        ("norm_eps", float("inf")),
        ("head_size", 10**9),
    ],
)
def test_a_size_that_the_weights_cannot_hold_is_refused_before_anything_is_built(
    name: str, value: Any, folder: Path
) -> None:
    fields = yaml.safe_load((folder / "model_config.yaml").read_text())
    (folder / "model_config.yaml").write_text(yaml.safe_dump(fields | {name: value}))
    with pytest.raises(InputError, match=r"model_config\.yaml|block_size|lit_model\.pth"):
        place(open_checkpoint(folder), None, accelerator="cpu")


def test_more_rows_than_positions_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="at most the model's block_size of 256"):
        SpecLLM.load(folder, accelerator="cpu", verify_width=100_000)


@pytest.mark.slow
def test_yaml_that_is_nested_deep_is_refused(folder: Path) -> None:
    for name in ("prompt_style.yaml", "model_config.yaml"):
        (folder / name).write_text("[" * 3000)
        with pytest.raises(InputError, match=name):
            TextCodec(folder, tiny_config()) if name.startswith("prompt") else open_checkpoint(folder)


@pytest.mark.parametrize("change", [lambda w: w.to_sparse(), lambda w: w.to("meta"), lambda w: w.to_sparse_csr()])
def test_tensors_that_are_not_dense_are_refused(change: Callable[..., Any], tmp_path: Path) -> None:
    weights = random_weights(tiny_config())
    weights["lm_head.weight"] = change(weights["lm_head.weight"])
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "odd", weights=weights))
    with pytest.raises(InputError, match=r"lm_head\.weight|damaged"):
        load_weights(GPT(tiny_config()), checkpoint)


@pytest.mark.parametrize("name", ["lit_model.pth", "model_config.yaml", "tokenizer_config.json"])
@pytest.mark.parametrize(("kind", "said"), [("link", "a link to 'gone'"), ("pipe", "a pipe or a device")])
def test_a_link_to_nothing_and_a_pipe_are_named(name: str, kind: str, said: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("gone") if kind == "link" else os.mkfifo(folder / name)
    with pytest.raises(InputError, match=f"{name}.*{said}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [[1], "x", 1.5, {}, True])
def test_an_odd_bos_is_refused(value: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "odd", generation_config={"bos_token_id": value, "eos_token_id": 2})
    with pytest.raises(InputError, match="bos_token_id"):
        TextCodec(folder, tiny_config())


def test_ids_that_fit_no_tensor_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "odd", tokenizer_config={"add_bos_token": True})
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["a"] = 2**32 - 2
    path.write_text(json.dumps(content))
    codec = TextCodec(folder, tiny_config())
    with pytest.raises(InputError, match=r"tokenizer|vocabulary"):
        codec.encode("a")


@pytest.mark.parametrize("settings", [{"draft_device": "meta"}, {"accelerator": "tpu"}])
def test_a_device_that_cannot_compute_is_refused(settings: dict[str, str], folder: Path) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        place(open_checkpoint(folder), open_checkpoint(folder), **{"accelerator": "cpu"} | settings)


# --- what a terminal obeys --------------------------------------------------------------------------------------------


@given(st.text(st.characters(max_codepoint=0x2100)))
def test_nothing_that_a_terminal_obeys_is_left_in_a_sentence(text: str) -> None:
    said = str(InputError(text))
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in said if char not in "\n\t")
    assert printable(said) == said


@given(st.text())
def test_a_line_of_json_is_one_line_without_controls_and_the_same_value(text: str) -> None:
    text = text.encode(errors="replace").decode()
    line = as_line(json.dumps(text, ensure_ascii=False)).decode()
    assert json.loads(line) == text
    assert len(line.splitlines()) == 1 and not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in line[:-1])


def test_files_of_a_job_are_made_as_the_umask_says(job: Callable[..., int], tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert job() == 0
    finally:
        os.umask(before)
    for name in ("o.jsonl", *BESIDE[1:]):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
