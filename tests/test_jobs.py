"""A job of many prompts ends with the same file after any interruption."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_weights, tiny_config, write_checkpoint
from job_child import child
from litgpt.prompts import PromptStyle

from litspec import SpecLLM
from litspec.checkpoint import open_checkpoint
from litspec.config import GenerateConfig, LoadConfig
from litspec.engine.engine import Engine
from litspec.errors import InputError
from litspec.jobs import disk, files, progress, run, run_job
from litspec.jobs.deciding import checkpoint_digest, deciding
from litspec.jobs.files import Answer, JobFiles
from litspec.jobs.prompts import Prompts
from litspec.llm import Completion, text_seed
from litspec.model import GPT
from litspec.report import Stats

TOKENS = 6


@dataclass
class Pair:
    """Folders of a tiny target and its draft, and how a job loads them."""

    target: Path
    draft: Path
    load: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.load = {"checkpoint_dir": str(self.target), "draft_dir": str(self.draft), "accelerator": "cpu"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = write_checkpoint(folder / "target", tiny_config(block_size=1024), seed=1)
    return Pair(target, write_checkpoint(folder / "draft", tiny_config(block_size=1024, n_layer=1), seed=2))


@pytest.fixture(scope="module")
def llm(pair: Pair) -> SpecLLM:
    return SpecLLM.load(**pair.load)


class Quick:
    """Replaces generation: texts are made at once from prompt, seed and index."""

    def __init__(self, llm: SpecLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.loads = 0
        self.before_text: Callable[[], None] = lambda: None
        self.slots = 1
        outer = self

        class QuickLLM(SpecLLM):
            @staticmethod
            @functools.wraps(SpecLLM.load)
            def load(**_: Any) -> SpecLLM:
                outer.loads += 1
                return QuickLLM(llm.placed, llm.codec, llm.drafter)

            def slots_for(self, batch_size: Any, texts: int, max_length: int) -> int:
                return outer.slots

            def complete(self, texts: Iterable[Any], *, slots: int = 1) -> Iterator[Any]:
                """Of texts that run at the same time, the last one to begin ends first."""
                texts, running = iter(texts), []
                while True:
                    for name, prompt, settings, index in itertools.islice(texts, slots - len(running)):
                        try:
                            self._prepare(prompt, settings, index)  # refuses what has to be refused
                        except InputError as error:
                            running.append((name, error))
                            continue
                        outer.calls.append(prompt)
                        outer.before_text()
                        text = f"{disk.digest(prompt, str(settings.seed), str(index))}\u2028 \x85 \N{LLAMA}"
                        stats = Stats(new_tokens=3, proposed=4, accepted=2, decode_seconds=time.time())
                        running.append((name, Completion(prompt, text, [1, 2, 3], "length", stats, [], [])))
                    if not running:
                        return
                    yield running.pop()

        monkeypatch.setattr(run, "SpecLLM", QuickLLM)


@pytest.fixture
def quick(llm: SpecLLM, monkeypatch: pytest.MonkeyPatch) -> Quick:
    return Quick(llm, monkeypatch)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path, [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(5)])


def write_prompts(folder: Path, lines: list[Any], name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def whole_lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def stats_of(out: Path) -> Path:
    return out.with_name(out.name + ".stats.jsonl")


def described(out: Path) -> Path:
    return out.with_name(out.name + ".job.json")


@pytest.fixture
def job(pair: Pair, prompts: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs a job in this process: job("out.jsonl", temperature=...)."""

    def start(out: str | Path = "out.jsonl", *, load: dict[str, Any] | None = None, **settings: Any) -> int:
        given = {"prompts_file": prompts, "max_new_tokens": TOKENS, **settings}
        return run_job(given.pop("prompts_file"), tmp_path / out, load={**pair.load, **(load or {})}, **given)

    return start


def undisturbed(job: Callable[..., int], tmp_path: Path, **settings: Any) -> bytes:
    assert job("undisturbed.jsonl", **settings) == 0
    return (tmp_path / "undisturbed.jsonl").read_bytes()


def assert_whole(out: Path, expected: bytes) -> None:
    """The out file is the expected one, the stats file has a line for each of its lines, and nothing else is left."""
    assert out.read_bytes() == expected
    assert [line["id"] for line in read(stats_of(out))] == [line["id"] for line in read(out)]
    assert sorted(p.name for p in out.parent.glob(f"{out.name}*")) == [
        out.name,
        f"{out.name}.job.json",
        f"{out.name}.stats.jsonl",
        f"{out.name}.summary.json",
    ]


# --- interrupted in one process, at every point -----------------------------------------------------------------------


class Dead(BaseException):
    """The process has ended."""


class MortalOS:
    """The os module up to the n-th call that changes files: that call is done by half, and later ones fail.

    Args:
        calls: n.
        error: What is raised at that call and after it.
        once: The calls after it work again.
    """

    CHANGING = ("open", "write", "fsync", "ftruncate", "replace")

    def __init__(self, calls: int, error: BaseException, once: bool = False) -> None:
        self.left, self.error, self.once = calls, error, once

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in self.CHANGING:
            return call

        def mortal(*args: Any) -> Any:
            self.left -= 1
            if self.left > 0 or (self.left < 0 and self.once):
                return call(*args)
            if self.left == 0 and name == "write":
                os.write(args[0], args[1][: len(args[1]) // 2])
            raise self.error

        return mortal


def points(job: Callable[..., int], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    """How many changing calls an undisturbed job makes."""
    counting = MortalOS(10**6, Dead())
    with monkeypatch.context() as patch:
        patch.setattr(disk, "os", counting)
        job("counted.jsonl", **settings)
    return 10**6 - counting.left


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_job_that_ended_at_any_call_is_resumed_to_the_same_file(
    job: Callable[..., int], quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    monkeypatch.setattr(files, "SYNC_SECONDS", 0)  # so that fsync calls are included
    texts = 2 * num_samples
    settings = {"prompts_file": write_prompts(tmp_path, ["one", "two"], "in.txt"), "num_samples": num_samples}
    expected = undisturbed(job, tmp_path, **settings)
    n = points(job, monkeypatch, **settings)
    assert n > 4 * texts
    for point in range(1, n + 1):
        quick.calls.clear()
        out = tmp_path / f"{point}.jsonl"
        with monkeypatch.context() as patch:
            patch.setattr(disk, "os", MortalOS(point, Dead()))
            with pytest.raises(Dead):
                job(out, **settings)
        whole = whole_lines(out)
        made = len(quick.calls)
        assert made - 1 <= whole <= made
        assert job(out, **settings) == 0
        assert_whole(out, expected)
        assert all("new_tokens" in line for line in read(stats_of(out)))
        assert len(quick.calls) == made + texts - whole  # finished texts are not generated again


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="only Linux tells the path of an open file")
def test_what_is_written_is_forced_to_the_disk_in_time(
    job: Callable[..., int], quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []

    class Recording(MortalOS):
        def __getattr__(self, name: str) -> Any:
            call = getattr(os, name)

            def recorded(*args: Any) -> Any:
                path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
                events.append((name, re.sub("[0-9a-f]{16}", "RANDOM", Path(path).name)))
                return call(*args)

            return recorded if name in ("write", "fsync", "replace") else call

    monkeypatch.setattr(disk, "os", Recording(0, Dead()))
    job()
    last = {event: number for number, event in enumerate(events)}
    first = {event: number for number, event in reversed(list(enumerate(events)))}
    described, renamed = "out.jsonl.job.json.RANDOM.tmp", last["replace", "out.jsonl.job.json.RANDOM.tmp"]
    assert last["write", described] < first["fsync", described] < renamed
    assert events[renamed + 1] == ("fsync", tmp_path.name) and renamed < first["write", "out.jsonl.stats.jsonl"]
    for name in ("out.jsonl", "out.jsonl.stats.jsonl"):
        assert last["write", name] < last["fsync", name]
    assert events.count(("fsync", "out.jsonl")) == 1  # five quick texts need only one fsync
    monkeypatch.setattr(files, "SYNC_SECONDS", 0)
    events.clear()
    job("slow.jsonl")
    assert events.count(("fsync", "slow.jsonl")) == 6


def test_a_full_disk_ends_a_job_with_a_sentence_and_without_a_torn_line(
    job: Callable[..., int], quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"prompts_file": write_prompts(tmp_path, ["one", "two", "three"], "in.txt")}
    expected = undisturbed(job, tmp_path, **settings)
    full = OSError(errno.ENOSPC, "No space left on device")
    refused = 0
    for point in range(1, points(job, monkeypatch, **settings) + 1):
        out = tmp_path / f"{point}.jsonl"
        with monkeypatch.context() as patch:
            patch.setattr(disk, "os", MortalOS(point, full, once=True))
            try:
                job(out, **settings)
            except InputError as error:
                assert "no room" in str(error) and f"{point}.jsonl" in str(error) and "same command" in str(error)
                refused += 1
        assert not out.exists() or expected.startswith(out.read_bytes())
        assert not out.exists() or out.read_bytes().endswith(b"\n") or out.stat().st_size == 0
        assert job(out, **settings) == 0
        assert_whole(out, expected)
    assert refused >= 2 * 3  # all but the note in the lock file


@pytest.mark.parametrize("tail", [b'{"id": "p2", "prom', b"{", b"\0" * 300, b"\0\n\0\n", "é".encode()[:1]])
def test_a_torn_end_is_cut_off(job: Callable[..., int], quick: Quick, tmp_path: Path, tail: bytes) -> None:
    expected = undisturbed(job, tmp_path)
    out = tmp_path / "out.jsonl"
    job(out)
    lines = expected.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + tail)
    stats_of(out).write_bytes(stats_of(out).read_bytes()[:-20])
    quick.calls.clear()
    assert job(out) == 0
    assert_whole(out, expected)
    assert quick.calls == ["prompt 2", "prompt 3", "prompt 4"]


def test_a_lost_stats_file_costs_no_text(job: Callable[..., int], quick: Quick, tmp_path: Path) -> None:
    expected = undisturbed(job, tmp_path)
    out = tmp_path / "out.jsonl"
    job(out)
    out.write_bytes(b"".join(expected.splitlines(keepends=True)[:3]))
    stats_of(out).unlink()
    quick.calls.clear()
    assert job(out) == 0
    assert_whole(out, expected)
    assert quick.calls == ["prompt 3", "prompt 4"]
    assert [len(line) > 1 for line in read(stats_of(out))] == [False, False, False, True, True]


@pytest.mark.parametrize("replacement", ["not json\n", '{"id": "p7", "text": ""}\n', '{"id": "p1"}\n', "[]\n", "\n"])
def test_a_line_that_the_job_did_not_write_is_refused_and_left_alone(
    job: Callable[..., int], quick: Quick, tmp_path: Path, replacement: str
) -> None:
    out = tmp_path / "out.jsonl"
    job(out)
    lines = out.read_text(encoding="utf-8").split("\n")
    damaged = "\n".join([lines[0], replacement[:-1], *lines[2:4], ""]).encode()
    out.write_bytes(damaged)
    with pytest.raises(InputError, match="Line 2 of"):
        job(out)
    assert out.read_bytes() == damaged


def test_a_file_with_more_lines_than_the_job_has_is_refused(
    job: Callable[..., int], quick: Quick, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    job(out)
    with out.open("ab") as file:
        file.write(out.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(InputError, match="Line 6 of"):
        job(out)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_file_that_no_job_wrote_is_never_touched(job: Callable[..., int], quick: Quick, tmp_path: Path) -> None:
    for name, content in (("a.jsonl", b"precious"), ("b.jsonl", b""), ("c.jsonl.stats.jsonl", b"precious")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=r"exists without"):
            job(name.removesuffix(".stats.jsonl"))
        assert (tmp_path / name).read_bytes() == content
    with pytest.raises(InputError, match=r"exists without"):
        job("in.jsonl")  # the prompts themselves
    assert quick.loads == 0
    with pytest.raises(InputError, match="does not exist"):
        job("nowhere/out.jsonl")
    described(tmp_path / "d.jsonl").write_text("{}")
    (tmp_path / "d.jsonl").write_text("precious")
    with pytest.raises(InputError, match="does not describe a job"):
        job("d.jsonl")


def interrupted(job: Callable[..., int], quick: Quick, texts: int, **settings: Any) -> None:
    """Runs a job that ends after a number of texts."""

    def end() -> None:
        if len(quick.calls) > texts:
            raise Dead

    quick.calls.clear()
    quick.before_text = end
    with pytest.raises(Dead):
        job(**settings)
    quick.before_text = lambda: None
    quick.calls.clear()


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.5}, r"temperature \(then 1.0, now 0.5\)"),
    ({"seed": 7}, r"seed \(then 1234, now 7\)"),
    ({"stop": ["x"]}, r"stop \(then \[\], now \['x'\]\)"),
    ({"num_samples": 2}, r"num_samples \(then 1, now 2\)"),
    ({"max_new_tokens": 7, "top_k": 3}, r"max_new_tokens \(then 6, now 7\), top_k \(then None, now 3\)"),
    ({"sampler": "coupled"}, r"sampler"),
    ({"speculative_k": 2}, r"speculative_k \(then 'auto', now 2\)"),
    ({"load": {"verify_width": 4}}, r"verify_width \(then 8, now 4\)"),
    ({"load": {"drafter": "prompt_lookup", "draft_dir": None}}, "the checkpoint in draft_dir"),
    ({"load": {"quantize": "bnb.nf4"}}, "quantize"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES, ids=lambda value: str(value)[:30])
def test_resuming_with_other_settings_is_refused_by_name(
    job: Callable[..., int], quick: Quick, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    interrupted(job, quick, 2)
    left = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(InputError, match=named) as refused:
        job(**change)
    assert str(refused.value).endswith("use the same settings as before, or another out_file.")
    assert (tmp_path / "out.jsonl").read_bytes() == left and quick.loads == 1
    assert job() == 0


def test_resuming_with_other_prompts_or_weights_is_refused(
    job: Callable[..., int], quick: Quick, pair: Pair, prompts: Path, tmp_path: Path
) -> None:
    interrupted(job, quick, 2)
    text = prompts.read_text()
    prompts.write_text(text.replace("prompt 4", "prompt four"))
    with pytest.raises(InputError, match="the content of prompts_file changed"):
        job()
    prompts.write_text(text)
    other = write_checkpoint(tmp_path / "other", tiny_config(block_size=1024), seed=3)
    with pytest.raises(InputError, match="the checkpoint in checkpoint_dir changed"):
        job(load={"checkpoint_dir": str(other)})
    with pytest.raises(InputError, match="the checkpoint in draft_dir"):
        job(load={"draft_dir": str(other)})
    moved = shutil.copytree(pair.target, tmp_path / "moved")
    assert job(load={"checkpoint_dir": str(moved)}) == 0


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.0}, {"sampler": "coupled"}])
def test_another_drafter_or_k_may_resume_where_it_changes_no_text(
    job: Callable[..., int], quick: Quick, settings: dict[str, Any]
) -> None:
    interrupted(job, quick, 2, **settings)
    assert job(**settings, speculative_k=3, load={"draft_dir": None, "drafter": "none"}) == 0
    assert len(quick.calls) == 3


def test_a_sampled_line_in_a_greedy_job_makes_its_drafter_count(
    job: Callable[..., int], quick: Quick, tmp_path: Path
) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b", "temperature": 0.7}, {"prompt": "c"}]
    settings = {"prompts_file": write_prompts(tmp_path, lines, "mixed.jsonl"), "temperature": 0.0}
    interrupted(job, quick, 1, **settings)
    with pytest.raises(InputError, match="speculative_k"):
        job(**settings, speculative_k=3)


def test_another_precision_is_refused(job: Callable[..., int], quick: Quick, llm: SpecLLM, tmp_path: Path) -> None:
    interrupted(job, quick, 2)
    description = json.loads(described(tmp_path / "out.jsonl").read_text())
    assert description["decides"]["precision"] == "float32" and description["decides"]["drafter"] == "DraftModel"
    description["decides"]["precision"] = "bfloat16"
    described(tmp_path / "out.jsonl").write_text(json.dumps(description))
    with pytest.raises(InputError, match=r"precision \(then 'bfloat16', now 'float32'\)"):
        job()


def test_a_setting_that_no_prompt_can_use_is_refused_before_anything_is_written(
    job: Callable[..., int], quick: Quick, tmp_path: Path
) -> None:
    for settings in ({"temperature": -1.0}, {"speculative_k": 8}, {"top_k": 0}, {"max_new_tokens": 5000}):
        with pytest.raises(InputError):
            job(**settings)
    with pytest.raises(InputError, match="num_samples must be at least 1"):
        job(num_samples=0)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_digest_of_a_checkpoint_sees_one_weight_and_no_path(pair: Pair, tmp_path: Path) -> None:
    config = tiny_config(block_size=1024)
    weights = random_weights(config, seed=1)
    weights["transformer.h.1.mlp.fc_1.weight"][3, 5] += 1e-6
    nearly = write_checkpoint(tmp_path / "nearly", config, weights=weights)
    same = write_checkpoint(tmp_path / "same", config, seed=1)
    styled = shutil.copytree(same, tmp_path / "styled")
    (styled / "tokenizer_config.json").write_text("{}")
    here = checkpoint_digest(open_checkpoint(pair.target))
    assert checkpoint_digest(open_checkpoint(same)) == here
    assert len({checkpoint_digest(open_checkpoint(folder)) for folder in (nearly, styled, same)}) == 3


def test_a_second_job_on_the_same_file_is_refused(
    job: Callable[..., int], quick: Quick, tmp_path: Path, prompts: Path
) -> None:
    second: list[str] = []

    def try_another() -> None:
        os.symlink(tmp_path / "out.jsonl", tmp_path / "link.jsonl") if not second else None
        with pytest.raises(InputError) as refused:
            job("link.jsonl")
        second.append(str(refused.value))

    quick.before_text = try_another
    assert job() == 0
    assert len(second) == 5 and f"is being written by process {os.getpid()} on" in second[0]
    assert not list(tmp_path.glob("*.lock"))


# --- prompts ----------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "good"}
BAD: list[tuple[str, str]] = [
    ('{"prompt": "x"', "is not JSON"),
    ("plain words", "is not JSON"),
    ('"a string"', "must be an object"),
    ("[1, 2]", "must be an object"),
    ('{"text": "x"}', "prompt must be a string, but the line has none"),
    ('{"prompt": 5}', "prompt must be a string, got 5"),
    ('{"prompt": null}', "prompt must be a string, got None"),
    ('{"prompt": "x", "max_tokens": 5}', "unknown key 'max_tokens'; did you mean max_new_tokens?"),
    ('{"prompt": "x", "colour": 5}', "unknown key 'colour'; known keys are id, prompt, sys_prompt"),
    ('{"prompt": "x", "speculative_k": 5}', "unknown key 'speculative_k'"),
    ('{"prompt": "x", "max_new_tokens": "5"}', "max_new_tokens must be a whole number, got '5'"),
    ('{"prompt": "x", "max_new_tokens": 5.5}', "max_new_tokens must be a whole number"),
    ('{"prompt": "x", "max_new_tokens": true}', "max_new_tokens must be a whole number, got True"),
    ('{"prompt": "x", "max_new_tokens": 0}', "max_new_tokens must be at least 1"),
    ('{"prompt": "x", "temperature": NaN}', "temperature must be a number of at least 0"),
    ('{"prompt": "x", "temperature": -1}', "temperature must be"),
    (f'{{"prompt": "x", "temperature": 1{"0" * 400}}}', "temperature must be a number"),
    ('{"prompt": "x", "top_p": 2}', "top_p must be in"),
    ('{"prompt": "x", "stop": [1]}', "stop must be a string, a list of strings or null"),
    ('{"prompt": "x", "stop": [""]}', "stop string is empty"),
    ('{"prompt": "x", "id": [1]}', "id must be a string or a whole number"),
    ('{"prompt": "\\ud83e"}', "an unpaired surrogate"),
    ('{"prompt": ""}', "has no tokens"),
    (json.dumps({"prompt": "x" * 1100}), "block_size is 1024"),
    ('{"prompt": "x", "max_new_tokens": 1000000000000000000000000}', "block_size is 1024"),
    ("[" * 100_000, "is not JSON"),
]


def test_a_bad_line_becomes_an_error_in_its_place_and_the_job_goes_on(
    job: Callable[..., int], quick: Quick, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = list(itertools.chain(*((GOOD, bad) for bad, _ in BAD)))
    path = write_prompts(tmp_path, [*lines, GOOD])
    with path.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n{"id": "mine", "prompt": "x", "seed": "y"}')
    assert job(prompts_file=path) == 1
    found = read(tmp_path / "out.jsonl")
    assert [line["id"] for line in found] == [*range(2 * len(BAD) + 2), "mine"]
    assert all(set(line) == {"id", "prompt", "text", "token_ids", "finish_reason"} for line in found[:-2:2])
    for line, (bad, sentence) in zip(found[1::2], BAD):
        assert set(line) == {"id", "error"} and sentence in line["error"], bad
    assert "not valid UTF-8 (byte 13)" in found[-2]["error"] and "seed must be a whole number" in found[-1]["error"]
    assert f"Line {2 * len(BAD) + 2} of prompts_file" in found[-2]["error"]
    assert f"{len(BAD) + 2} errors" in capsys.readouterr().err
    assert job(prompts_file=path) == 1  # nothing is left to do, but there were errors
    assert quick.loads == 1


def test_what_a_folder_decides_by_its_name_is_part_of_the_job(
    job: Callable[..., int], pair: Pair, tmp_path: Path
) -> None:
    """LitGPT puts BOS before prompts for a folder whose name begins with Llama-3."""
    first, out = tmp_path / "tiny", tmp_path / "out.jsonl"
    shutil.copytree(pair.target, first)
    load = {"draft_dir": None, "drafter": "none"}
    assert job(load=load | {"checkpoint_dir": str(first)}) == 0
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    begun = out.read_bytes()
    moved = first.rename(tmp_path / "moved")
    shutil.copytree(moved, tmp_path / "Llama-3-tiny")
    with pytest.raises(InputError, match=r"bos \(then False, now True\)"):
        job(load=load | {"checkpoint_dir": str(tmp_path / "Llama-3-tiny")})
    assert out.read_bytes() == begun
    assert job(load=load | {"checkpoint_dir": str(moved)}) == 0  # another name that decides nothing


def test_prompt_style_and_stops_are_part_of_the_job(
    job: Callable[..., int], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A style may be a class of the user's, which is not among the folder's files."""
    load = {"draft_dir": None, "drafter": "none", "checkpoint_dir": str(pair.target)}
    wanted = deciding(
        Prompts(write_prompts(pair.target.parent, ["{}"])), vars(LoadConfig(**load)), vars(GenerateConfig())
    )

    class Polite(PromptStyle):
        end = " please"

        def apply(self, prompt: str, *, sys_prompt: str | None = None, **_: str) -> str:
            return prompt + self.end

        def stop_tokens(self, tokenizer: Any) -> tuple[list[int], ...]:
            return ([tokenizer.eos_id], [7])

    def changed() -> set[str]:
        found = deciding(prompts_of, vars(LoadConfig(**load)), vars(GenerateConfig()))
        return {name for name in found if found[name] != wanted[name]}

    prompts_of = Prompts(pair.target.parent / "in.jsonl")
    assert changed() == set()
    monkeypatch.setattr("litspec.text._prompt_style", lambda *_: Polite())
    assert changed() == {"prompt_style", "prompt_template", "stop_tokens"}
    wanted = deciding(prompts_of, vars(LoadConfig(**load)), vars(GenerateConfig()))
    monkeypatch.setattr(Polite, "end", " now")
    assert changed() == {"prompt_template"}


def test_plain_lines_are_prompts_as_they_are(job: Callable[..., int], quick: Quick, tmp_path: Path) -> None:
    path = tmp_path / "in.TXT"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\n  \n  second \n" + '{"prompt": "third"} é'.encode())
    assert job(prompts_file=path) == 0
    found = read(tmp_path / "out.jsonl")
    assert [line["prompt"] for line in found] == ["first", "  second ", '{"prompt": "third"} é']
    assert [line["id"] for line in found] == [0, 1, 2]


def test_a_file_of_prompts_that_cannot_be_one_is_refused(job: Callable[..., int], quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt\nx\n")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    for name, sentence in (
        ("in.csv", "must end in .jsonl"),
        ("empty.jsonl", "no prompt"),
        ("no.txt", "cannot be read"),
    ):
        with pytest.raises(InputError, match=sentence):
            job(prompts_file=tmp_path / name)
    assert not (tmp_path / "out.jsonl").exists()


def test_samples_follow_each_other_and_asking_for_more_changes_none(
    job: Callable[..., int], quick: Quick, tmp_path: Path
) -> None:
    for n in (1, 2, 3):
        assert job(f"{n}.jsonl", num_samples=n) == 0
    one, two, three = (read(tmp_path / f"{n}.jsonl") for n in (1, 2, 3))
    assert [(line["id"], line["sample"]) for line in three] == [(f"p{i}", s) for i in range(5) for s in range(3)]
    assert [line["text"] for line in three[::3]] == [line["text"] for line in one]
    assert [line["text"] for line in three[1::3]] == [line["text"] for line in two[1::2]]
    assert len({line["text"] for line in three}) == 15


def test_every_line_is_one_for_every_reader(job: Callable[..., int], quick: Quick, tmp_path: Path) -> None:
    job()
    raw = (tmp_path / "out.jsonl").read_bytes()
    assert len(raw.decode().splitlines()) == raw.count(b"\n") == 5
    assert "\u2028 \x85 \N{LLAMA}" in json.loads(raw.split(b"\n")[0])["text"]
    assert "\N{LLAMA}".encode() in raw


# --- signals and progress ---------------------------------------------------------------------------------------------


def test_sigterm_ends_a_job_behind_its_present_text(
    job: Callable[..., int], quick: Quick, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = undisturbed(job, tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    quick.calls.clear()
    quick.before_text = lambda: os.kill(os.getpid(), signal.SIGTERM) if len(quick.calls) == 3 else None
    assert job() == 143
    assert signal.getsignal(signal.SIGTERM) is before
    out = tmp_path / "out.jsonl"
    assert out.read_bytes() == b"".join(expected.splitlines(keepends=True)[:3])
    assert len(read(stats_of(out))) == 3
    assert "SIGTERM: stopping after the running texts" in capfd.readouterr().err
    assert job() == 0
    assert_whole(out, expected)
    assert len(quick.calls) == 5


@pytest.mark.parametrize("where", ["in a text", "in a line"])
def test_ctrl_c_keeps_what_is_finished(
    job: Callable[..., int], quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = undisturbed(job, tmp_path)
    quick.calls.clear()
    if where == "in a text":
        quick.before_text = lambda: os.kill(os.getpid(), signal.SIGINT) if len(quick.calls) == 3 else None
    else:
        put = files.Results.put

        def put_interrupted(self: files.Results, answer: Answer) -> Any:
            if answer.number == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return put(self, answer)

        monkeypatch.setattr(files.Results, "put", put_interrupted)
    with pytest.raises(KeyboardInterrupt):
        job()
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(expected.splitlines(keepends=True)[:2])
    monkeypatch.undo()


def test_progress_is_lines_where_there_is_no_terminal_and_a_bar_where_there_is_one(
    job: Callable[..., int], quick: Quick, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0)
    job("plain.jsonl")
    said = capsys.readouterr()
    assert said.out == "" and "\x1b" not in said.err
    assert "2/5 texts" in said.err and "tokens/s, acceptance rate 0.50" in said.err and "s left" in said.err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    job("bar.jsonl")
    said = capsys.readouterr()
    assert said.out == "" and "5/5 texts" in said.err and "2/5 texts" not in said.err


def test_progress_counts_texts_that_wait_for_the_text_before_them(
    job: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0)
    put, shown = files.Results.put, []

    def put_and_look(self: files.Results, answer: Answer) -> None:
        shown.append(capsys.readouterr().err.count("s left"))
        put(self, answer)

    monkeypatch.setattr(files.Results, "put", put_and_look)
    # The other texts have ended long before the first line's.
    lines = [{"prompt": "a", "max_new_tokens": 90}, *({"prompt": "a", "max_new_tokens": 3} for _ in range(5))]
    assert job(prompts_file=write_prompts(tmp_path, lines), batch_size=2) == 0
    assert shown == [6, 0, 0, 0, 0, 0]
    assert "6/6 texts" in capsys.readouterr().err


# --- texts ------------------------------------------------------------------------------------------------------------


def test_a_job_gives_the_texts_of_plain_calls(job: Callable[..., int], pair: Pair, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "one"},
        {"prompt": "two", "temperature": 0.3, "top_k": 20, "max_new_tokens": 9},
        {"prompt": "three", "stop": "e", "top_p": 0.9},
        {"prompt": "four", "seed": 5, "min_new_tokens": 3, "sys_prompt": None},
        {"prompt": "five", "temperature": 0},
    ]
    assert job(prompts_file=write_prompts(tmp_path, lines), num_samples=2, seed=11) == 0
    llm = SpecLLM.load(**pair.load)
    for i, line in enumerate(lines):
        for sample in range(2):
            given = {"max_new_tokens": TOKENS, "seed": 11} | line
            given["seed"] = text_seed(given["seed"], sample) if sample else given["seed"]
            completion = llm.generate(given.pop("prompt"), index=i, **given)
            assert read(tmp_path / "out.jsonl")[2 * i + sample] == {
                "id": i,
                "sample": sample,
                "prompt": line["prompt"],
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
    stats = read(stats_of(tmp_path / "out.jsonl"))
    assert len(stats) == 10 and all(line["new_tokens"] > 0 and line["prefill_seconds"] > 0 for line in stats)


def test_a_prefix_that_prompts_share_is_read_once_and_changes_no_bit(
    job: Callable[..., int], pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = "It is a truth universally acknowledged. " * 15  # 600 tokens, one a byte
    ends = ["", "a", "ab" * 30, "c" * 100, "a" * 60, "d" * 200, "e" * 300]  # growing for the most part
    path = write_prompts(tmp_path, [shared + end for end in ends], "in.txt")
    rows: list[int] = []
    prefill = GPT.prefill

    def counting(self: GPT, idx: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(idx.size(1))
        return prefill(self, idx, *args, **kwargs)

    monkeypatch.setattr(GPT, "prefill", counting)
    engines: list[Engine] = []
    make = Engine.__init__

    def counted(self: Engine, *args: Any, **settings: Any) -> None:
        engines.append(self)
        make(self, *args, **settings)

    monkeypatch.setattr(Engine, "__init__", counted)
    assert job("with.jsonl", prompts_file=path, batch_size=1, load={"draft_dir": None}) == 0
    assert rows == [512, 88, *(600 + len(end) - 512 for end in ends[1:])]
    assert len(engines) == 1 and engines[0].max_length == 900 + TOKENS  # none was replaced as prompts grew

    assert job("drafted.jsonl", prompts_file=path, batch_size=1) == 0

    take = SpecLLM._take_engine
    monkeypatch.setattr(
        SpecLLM, "_take_engine", lambda self, *args: (setattr(self, "_idle", None), take(self, *args))[1]
    )
    # And another one for each text.
    monkeypatch.setattr(SpecLLM, "_engine_for", lambda self, text, slots, _: self._take_engine(text.max_length, slots))
    rows.clear()
    assert job("without.jsonl", prompts_file=path, batch_size=1, load={"draft_dir": None}) == 0
    assert rows == [size for end in ends for size in (512, 600 + len(end) - 512)]
    assert (tmp_path / "with.jsonl").read_bytes() == (tmp_path / "without.jsonl").read_bytes()
    assert job("drafted_without.jsonl", prompts_file=path, batch_size=1) == 0
    assert (tmp_path / "drafted.jsonl").read_bytes() == (tmp_path / "drafted_without.jsonl").read_bytes()


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Any:
    """Forks processes from one that has imported everything, which takes longer than any job here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "litspec.jobs"])
    first = context.Process(target=time.sleep, args=(0,))  # it imports when it is first asked
    first.start()
    first.join()
    return context


@dataclass
class RealJob:
    """A job in processes of its own.

    Attributes:
        settings: Of its texts.
        expected: What its file must hold in the end, from plain calls.
    """

    processes: Any
    pair: Pair
    path: Path
    expected: bytes
    settings: dict[str, Any]

    def start(
        self,
        out: Path,
        ranks: int = 1,
        *,
        path: Path | None = None,
        limits: dict[int, int] | None = None,
        batch_size: int | str = "auto",
        **load: Any,
    ) -> list[Any]:
        """Starts a job on several ranks, like a launcher.

        Args:
            out: The out file.
            ranks: How many.
            path: Other prompts.
            limits: For a rank the largest size of a file that it can write.
            batch_size: Texts at the same time.
            load: Arguments of `SpecLLM.load`.
        """
        started = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        env: dict[str, str] = {}
        if ranks > 1:
            load = {"placement": "replicate", "devices": ranks, **load}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
            env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank in range(ranks):
            own = env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            settings = self.settings | {"batch_size": batch_size}
            arguments = (path or self.path, out, self.pair.load | load, own, settings, (limits or {}).get(rank))
            process = self.processes.Process(target=child, args=arguments)
            process.start()
            started.append(process)
        return started

    def run(self, out: Path, ranks: int = 1, **more: Any) -> list[int]:
        """Runs a job to its end; the exit codes of its ranks."""
        started = self.start(out, ranks, **more)
        for process in started:
            process.join(120)
        return [process.exitcode for process in started]


@pytest.fixture(scope="module")
def real(processes: Any, pair: Pair, llm: SpecLLM, tmp_path_factory: pytest.TempPathFactory) -> RealJob:
    folder = tmp_path_factory.mktemp("real")
    lines = [{"prompt": f"{i}: " + "word " * (i % 4), "max_new_tokens": 4 + i % 5} for i in range(24)]
    path = write_prompts(folder, lines)
    settings = {"seed": 3, "temperature": 0.9}
    records = []
    for i, line in enumerate(lines):
        given = {**line}
        completion = llm.generate(given.pop("prompt"), index=i, **given, **settings)
        record = {"id": i, "prompt": line["prompt"], "text": completion.text, "token_ids": completion.token_ids}
        records.append(record | {"finish_reason": completion.finish_reason})
    expected = b"".join(disk.as_line(json.dumps(record, ensure_ascii=False)) for record in records)
    return RealJob(processes, pair, path, expected, settings)


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_job_killed_at_20_random_moments_ends_with_the_file_of_an_undisturbed_one(
    real: RealJob, tmp_path: Path, batch_size: int
) -> None:
    began = time.monotonic()
    assert real.run(tmp_path / "undisturbed.jsonl", batch_size=batch_size) == [0]
    seconds = time.monotonic() - began
    assert_whole(tmp_path / "undisturbed.jsonl", real.expected)
    moments = random.Random(0)
    kills = 0
    for number in itertools.count():
        out, before = tmp_path / f"{number}.jsonl", 0
        while kills < 20:
            process = real.start(out, batch_size=batch_size)[0]
            process.join(moments.uniform(0, seconds))
            process.kill()
            process.join()
            if process.exitcode == 0:
                break
            kills += 1
            assert before <= whole_lines(out)
            before = whole_lines(out)
            if out.exists():
                content = out.read_bytes()
                assert real.expected.startswith(content[: content.rfind(b"\n") + 1])
        if kills == 20:
            break
        assert_whole(out, real.expected)
    assert real.run(out) == [0]
    assert_whole(out, real.expected)


@pytest.mark.slow
def test_any_number_of_ranks_gives_the_same_file_and_resumes_what_another_number_left(
    real: RealJob, tmp_path: Path
) -> None:
    assert real.run(tmp_path / "two.jsonl", ranks=2) == [0, 0]
    assert_whole(tmp_path / "two.jsonl", real.expected)

    out = tmp_path / "out.jsonl"
    started = real.start(out, ranks=3, batch_size=1)
    wait_for(lambda: whole_lines(out) >= 4)
    for process in started[::-1]:
        process.kill()
        process.join()
    assert 4 <= whole_lines(out) < 24
    assert list(tmp_path.glob("out.jsonl.rank2-0.part"))
    assert real.run(out, ranks=2) == [0, 0]
    assert_whole(out, real.expected)


@pytest.mark.slow
def test_a_target_cut_across_ranks_resumes_too(real: RealJob, tmp_path: Path) -> None:
    cut = {"ranks": 2, "placement": "tensor_parallel"}
    assert real.run(tmp_path / "undisturbed.jsonl", **cut) == [0, 0]
    expected = (tmp_path / "undisturbed.jsonl").read_bytes()
    assert len(expected.splitlines()) == 24

    out = tmp_path / "out.jsonl"
    started = real.start(out, batch_size=1, **cut)
    wait_for(lambda: whole_lines(out) >= 4)
    os.kill(started[0].pid, signal.SIGTERM)
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [143, 0]
    left = whole_lines(out)
    assert 4 <= left < 24
    assert real.run(out) == [1]
    assert "tensor_parallel (then 2, now 1)" in (tmp_path / "stderr.txt").read_text()
    assert real.run(out, **cut) == [0, 0]
    assert_whole(out, expected)
    assert f"{left} of 24 texts are finished" in (tmp_path / "stderr.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_cannot_write_ends_the_job_with_a_sentence(real: RealJob, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    # The errors of a child make it end with 1, as any exception does.
    assert real.run(out, ranks=2, limits={1: 3500}, batch_size=1) == [1, 1]
    said = (tmp_path / "stderr.txt").read_text()
    assert "rank1-0.part' cannot be written: File too large" in said and "Another rank could not continue" in said
    assert real.run(out, limits={0: 1500}, batch_size=1) == [1]
    assert b"\n" in out.read_bytes() and real.expected.startswith(out.read_bytes())
    assert real.run(out) == [0]
    assert_whole(out, real.expected)


def test_texts_that_ranks_left_behind_are_taken_over_and_not_made_again(
    job: Callable[..., int], quick: Quick, tmp_path: Path
) -> None:
    expected = undisturbed(job, tmp_path)
    interrupted(job, quick, 1)
    lines = expected.decode().split("\n")
    wanted = json.loads(described(tmp_path / "out.jsonl").read_text())["decides"]
    hashed = int(disk.digest(disk.dump(dict(sorted(wanted.items()))))[:15], 16)
    job_files = JobFiles(tmp_path / "out.jsonl")
    for rank, numbers in ((1, (2, 4)), (2, (2,))):
        part = job_files.new_part(rank, hashed)
        for number in numbers:
            part.put(Answer(number, lines[number], json.dumps({"id": f"p{number}", "new_tokens": 1})))
        part.close()
    with open(tmp_path / "out.jsonl.rank1-0.part", "ab") as file:
        file.write(b'{"number": 3, "line": "')  # torn
    foreign = job_files.new_part(0, hashed + 1)
    foreign.put(Answer(3, '{"id": "p3", "text": "of another job"}', '{"id": "p3"}'))
    foreign.close()
    assert job() == 0
    assert quick.calls == ["prompt 1", "prompt 3"]
    assert_whole(tmp_path / "out.jsonl", expected)


def test_sigterm_to_any_rank_ends_all_of_them(real: RealJob, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    started = real.start(out, ranks=2, batch_size=1)
    wait_for(lambda: whole_lines(out) >= 2)
    os.kill(started[1].pid, signal.SIGTERM)
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [143, 0]
    assert real.expected.startswith(out.read_bytes()) and out.read_bytes().endswith(b"\n")
    assert real.run(out) == [0]
    assert_whole(out, real.expected)


def test_a_second_sigterm_ends_a_job_at_once(real: RealJob, tmp_path: Path) -> None:
    lines = [{"prompt": "short"}, {"prompt": "long", "max_new_tokens": 1000, "min_new_tokens": 1000}]
    out = tmp_path / "out.jsonl"
    process = real.start(out, path=write_prompts(tmp_path, lines))[0]
    wait_for(lambda: whole_lines(out) == 1)
    os.kill(process.pid, signal.SIGTERM)
    wait_for(lambda: "a second SIGTERM stops at once" in (tmp_path / "stderr.txt").read_text())
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == -signal.SIGTERM  # which a shell calls 143
    assert whole_lines(out) == 1


@pytest.mark.slow
def test_the_command_runs_a_job(pair: Pair, tmp_path: Path) -> None:
    write_prompts(tmp_path, [{"id": "a", "prompt": "first"}, {"id": "b"}])
    command = [sys.executable, "-m", "litspec", "generate", "--prompts_file", "in.jsonl", "--out_file", "out.jsonl"]
    command += ["--checkpoint_dir", str(pair.target), "--draft_dir", str(pair.draft), "--max_new_tokens", "3"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    assert "2/2 texts" in ended.stderr and "1 error" in ended.stderr
    found = read(tmp_path / "out.jsonl")
    assert len(found[0]["token_ids"]) <= 3 and "prompt must be a string" in found[1]["error"]
