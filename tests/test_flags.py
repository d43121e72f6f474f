"""Flags and config files: strings arrive unchanged, numbers as numbers, and anything else gives an error."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from litspec.__main__ import COMMANDS, main

# Strings with a special meaning in YAML: comments, markers, null, lists, numbers, an alias, a tag.
AS_TYPED = [
    *("###", "### Instruction:", "---", "null", "~", "[INST]", "#1", "# a", "true", "1", "1.0", "{}", "a: b", "- a"),
    *("-", "---x", "-5 degrees", "!x", "*x", "&x", "%", "'", '"quoted"', " a ", "\n", "\n\nUser:", "", "None", "@"),
]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would be called with."""
    found: dict[str, Any] = {}

    def call(**values: Any) -> int:
        found.update(values)
        return 0

    for name, function in list(COMMANDS.items()):
        recorder = _like(function, call)
        monkeypatch.setitem(COMMANDS, name, recorder)
    return found


def _like(function: Any, call: Any) -> Any:
    @functools.wraps(function)
    def recorder(**values: Any) -> int:
        return call(**values)

    return recorder


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in args])
    return int(exit_.value.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("text", AS_TYPED, ids=repr)
def test_a_string_arrives_as_it_was_typed(called: dict[str, Any], text: str) -> None:
    flags = ["prompt", "sys_prompt", "checkpoint_dir", "draft_dir", "prompts_file", "out_file", "draft_device"]
    for tie in ([f"--{name}={text}" for name in flags], [word for name in flags for word in (f"--{name}", text)]):
        called.clear()
        assert run("generate", *tie) == 0
        assert {name: called[name] for name in flags} == dict.fromkeys(flags, text)


@pytest.mark.slow
@pytest.mark.parametrize("text", AS_TYPED, ids=repr)
def test_a_stop_arrives_as_it_was_typed_beside_the_others(called: dict[str, Any], text: str) -> None:
    assert run("generate", "--stop", "good", "--stop", text, f"--stop={text}") == 0
    assert called["stop"] == ["good", text, text]


@pytest.mark.slow
@pytest.mark.parametrize("text", AS_TYPED, ids=repr)
def test_a_string_of_a_file_arrives_as_the_file_has_it(called: dict[str, Any], tmp_path: Path, text: str) -> None:
    values = {"prompt": text, "sys_prompt": text, "draft_dir": text, "out_file": text, "stop": ["good", text]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert run("generate", "--config", tmp_path / "run.yaml", "--stop", "more") == 0
    assert {name: called[name] for name in values} == values | {"stop": ["good", text, "more"]}
    values["stop"] = text
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert run("generate", "--config", tmp_path / "run.yaml") == 0
    assert called["stop"] in (text, [text])


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_strings_of_the_other_commands_arrive_too(called: dict[str, Any], command: str) -> None:
    assert run(command, "--checkpoint_dir", "#1", "--draft_dir", "null", "--prompts_file", "[a]") == 0
    assert (called["checkpoint_dir"], called["draft_dir"], called["prompts_file"]) == ("#1", "null", "[a]")


def test_numbers_nothing_and_choices_are_read(called: dict[str, Any], tmp_path: Path) -> None:
    flags = ["--top_k", "null", "--exit_layer", "3", "--speculative_k", "4", "--temperature", "1", "--devices", "2"]
    assert run("generate", *flags, "--compile", "--precision", "32-true", "--include_prompt", "false") == 0
    expected = {"top_k": None, "exit_layer": 3, "speculative_k": 4, "temperature": 1.0, "devices": 2}
    expected |= {"compile": True, "precision": "32-true", "include_prompt": False}
    assert {name: called[name] for name in expected} == expected
    assert run("generate", "--top_k", "7", "--speculative_k", "auto", "--devices", "auto", "--temperature=1e-1") == 0
    assert (called["top_k"], called["speculative_k"], called["devices"], called["temperature"]) == (
        7,
        "auto",
        "auto",
        0.1,
    )
    (tmp_path / "run.yaml").write_text("top_k: null\nexit_layer: 3\ntemperature: 1\ncompile: true\nstop: null\n")
    assert run("generate", "--config", tmp_path / "run.yaml") == 0
    assert (called["top_k"], called["exit_layer"], called["compile"], called["stop"]) == (None, 3, True, None)
    assert called["temperature"] == 1.0


@pytest.mark.parametrize(
    ("flag", "given", "sentence"),
    [
        ("top_k", "x", "litspec: top_k must be a whole number or null, got 'x'."),
        ("temperature", "hot", "litspec: temperature must be a number, got 'hot'."),
        ("compile", "maybe", "litspec: compile must be True or False, got 'maybe'."),
        ("sampler", "beam", "litspec: sampler must be 'rejection' or 'coupled', got 'beam'."),
        ("devices", "[]", None),
        ("seed", "null", "litspec: seed must be a whole number, got 'null'."),
    ],
)
def test_what_a_flag_cannot_take_is_one_plain_sentence_in_flag_and_file(
    called: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flag: str,
    given: str,
    sentence: str | None,
) -> None:
    if sentence is None:
        assert run("generate", f"--{flag}", given) == 0 and called[flag] == given
        return
    assert run("generate", f"--{flag}", given) == 2
    err = capsys.readouterr().err
    assert err.startswith(sentence) and err.count("\n") == 1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({flag: given}))
    assert run("generate", "--config", tmp_path / "run.yaml") == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_a_value_that_is_no_string_in_a_file_is_refused_with_advice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("stop: [1]\n")
    assert run("generate", "--config", tmp_path / "run.yaml") == 2
    assert capsys.readouterr().err.startswith(
        "litspec: stop must be a list of strings or null, got [1] (put it in quotes)"
    )


def test_a_flag_without_its_value_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--prompt"], ["--prompt", "--seed", "3"]):
        assert run("generate", *args) == 2
        assert "--prompt" in capsys.readouterr().err
