"""README's code runs, and its commands have flags that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from litspec.__main__ import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)


def test_the_drafter_of_your_own_keeps_its_promises_and_drafts() -> None:
    (code,) = [code for language, code in BLOCKS if language == "python" and "class Phrases" in code]
    names: dict = {}
    exec(code, names)  # check_drafter in it raises where a promise is broken
    out = names["llm"].generate("She was told that Mrs. W", max_new_tokens=20, temperature=0.0)
    assert (
        out.token_ids
        == names["plain"].generate("She was told that Mrs. W", max_new_tokens=20, temperature=0.0).token_ids
    )


def commands() -> list[list[str]]:
    """Every `litspec` command in README's shell blocks, without continuation lines and comments."""
    found = []
    for language, code in BLOCKS:
        if language != "bash":
            continue
        for line in code.replace("\\\n", " ").splitlines():
            line = line.replace('"..."', "text").replace("...", "x").replace("$R", "0")
            if match := re.search(r"(?:^|&& |-m |srun .*?|\) )litspec\)? ((?:generate|verify|bench) .*)$", line):
                found.append(shlex.split(match.group(1), comments=True))
    return found


def test_readme_shows_commands() -> None:
    assert {command[0] for command in commands()} >= {"generate", "verify"}
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command)[:60])
def test_a_command_of_readme_parses(command: list[str]) -> None:
    build_parser().parse_args([arg for arg in command if arg != "x"])
