"""Settings: one list of arguments, checked before anything is loaded, with clear errors."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.config import GenerateConfig, LoadConfig
from litspec.errors import InputError
from litspec.jobs import run_job
from litspec.sampling import Sampling

WRONG_TYPES: list[dict[str, Any]] = [
    {"max_new_tokens": 5.0},
    {"max_new_tokens": "5"},
    {"max_new_tokens": None},
    {"min_new_tokens": True},
    {"temperature": None},
    {"temperature": "hot"},
    {"temperature": 10**400},
    {"top_k": True},
    {"top_k": 2.5},
    {"top_p": "0.9"},
    {"top_p": [0.9]},
    {"seed": 1.0},
    {"seed": "7"},
    {"sampler": None},
    {"speculative_k": 2.0},
    {"speculative_k": True},
    {"speculative_k": None},
    {"stop": [3]},
    {"stop": 3},
    {"stop": b"x"},
    {"sys_prompt": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "target", seed=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> SpecLLM:
    return SpecLLM.load(folder, accelerator="cpu")


@pytest.mark.parametrize("setting", WRONG_TYPES, ids=str)
def test_a_setting_of_a_wrong_type_is_a_sentence_that_names_it(
    llm: SpecLLM, folder: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    (name,) = setting
    with pytest.raises(InputError, match=f"^{name} must be .*, got "):
        llm.generate("abc", **setting)
    (tmp_path / "in.txt").write_text("abc\n")
    with pytest.raises(InputError, match=f"^{name} must be .*, got "):
        run_job(tmp_path / "in.txt", tmp_path / "out.jsonl", load={"checkpoint_dir": str(folder)}, **setting)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize("setting", [{"temperature": None}, {"temperature": "1"}, {"top_k": True}, {"top_p": None}])
def test_sampling_takes_no_other_types(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(InputError, match=f"^{name} must be .*, got "):
        Sampling(**setting)


@pytest.mark.parametrize(
    "setting",
    [
        {"verify_width": 8.0},
        {"verify_width": None},
        {"devices": None},
        {"devices": 1.5},
        {"num_nodes": "two"},
        {"num_nodes": 0},
        {"exit_layer": "first"},
        {"exit_layer": 0},
        {"compile": "yes"},
        {"placement": 3},
        {"precision": 32},
        {"quantize": "int3"},
        {"draft_device": 0},
        {"checkpoint_dir": 3},
        {"drafter": "magic"},
        {"drafter": 3},
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_a_sentence_before_a_folder_is_opened(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(InputError, match=f"^{name} must be "):
        SpecLLM.load(**({"checkpoint_dir": "no/such/folder"} | setting))


def test_numbers_of_numpy_are_numbers(llm: SpecLLM) -> None:
    given = llm.generate("abc", max_new_tokens=np.int64(4), temperature=np.float32(0.5), top_k=np.int32(3), seed=1)
    assert given.token_ids == llm.generate("abc", max_new_tokens=4, temperature=0.5, top_k=3, seed=1).token_ids


@pytest.mark.parametrize("prompt", [3, None, b"abc", [3], ["abc", None]], ids=str)
def test_a_prompt_that_is_no_text_is_a_sentence(llm: SpecLLM, prompt: Any) -> None:
    with pytest.raises(InputError, match="must be a string or a list of strings, got "):
        llm.generate(prompt)


def test_the_arguments_of_load_and_generate_can_be_looked_up() -> None:
    load = inspect.signature(SpecLLM.load).parameters
    assert list(load)[:2] == ["checkpoint_dir", "draft_dir"]
    assert load["checkpoint_dir"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {"drafter", "devices", "verify_width", "compile", "quantize", "exit_layer"} <= set(load)
    assert load["verify_width"].default == 8 and load["verify_width"].kind is inspect.Parameter.KEYWORD_ONLY
    generate = inspect.signature(SpecLLM.generate).parameters
    assert (generate["temperature"].default, generate["top_k"].default, generate["seed"].default) == (1.0, None, None)
    assert {"prompt", "stop", "stream", "index", "max_new_tokens", "sampler"} <= set(generate)
    for method, parameters in ((SpecLLM.load, load), (SpecLLM.generate, generate)):
        for name in parameters.keys() - {"self"}:
            assert f"    {name}: " in method.__doc__
    with pytest.raises(TypeError, match="no_such"):
        SpecLLM.load(no_such=1)


@pytest.mark.parametrize("command", ["generate", "verify", "bench"])
@pytest.mark.parametrize(
    "flags", [["--top_p", "2"], ["--temperature", "-1"], ["--max_new_tokens", "0"], ["--verify_width", "0"]], ids=str
)
def test_a_command_checks_settings_before_it_opens_a_folder(
    capsys: pytest.CaptureFixture[str], command: str, flags: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--checkpoint_dir", "no/such/folder", *flags])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and out == ""
    assert flags[0][2:] in err and "no/such/folder" not in err and "Traceback" not in err


def test_more_proposals_than_rows_are_refused_before_a_folder_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--checkpoint_dir", "no/such/folder", "--speculative_k", "9"])
    assert "speculative_k must be below verify_width" in capsys.readouterr().err


def test_flags_have_litgpts_defaults_and_python_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`litgpt generate` has temperature 0.8, top_k 50 and seed 1234."""
    with pytest.raises(SystemExit):
        main(["generate", "--print_config"])
    printed = capsys.readouterr().out
    assert "temperature: 0.8\n" in printed and "top_k: 50\n" in printed and "seed: 1234\n" in printed
    assert (GenerateConfig().temperature, GenerateConfig().top_k) == (1.0, None)
    assert LoadConfig() == LoadConfig(None, None)


def test_a_line_of_a_job_with_a_wrong_type_gets_its_own_error(folder: Path, tmp_path: Path) -> None:
    given = [{"max_new_tokens": 5.0}, {"top_k": True}, {"temperature": None}, {"stop": [3]}, {"seed": None}, {}]
    lines = [json.dumps({"prompt": "abc"} | line) + "\n" for line in given]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    load = {"checkpoint_dir": str(folder), "accelerator": "cpu"}
    assert run_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", load=load, max_new_tokens=3) == 1
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for line, answer in zip(given[:-1], answers):
        assert f": {next(iter(line))} must be " in answer["error"]
    assert "text" in answers[-1]
