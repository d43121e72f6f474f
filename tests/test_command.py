"""The `litspec` command, end to end: as a subprocess where the process matters, else through `main`."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_level_tokenizer, lively_weights, tiny_config, write_checkpoint
from litgpt.config import Config
from litgpt.generate.base import generate as litgpt_generate
from litgpt.model import GPT
from litgpt.tokenizer import Tokenizer

from litspec import __version__
from litspec.__main__ import main
from litspec.demo import DEMO_TARGET

LITSPEC = [sys.executable, "-m", "litspec"]
PROMPT = "It was a truth"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny random target and a tiny random draft."""
    folder = tmp_path_factory.mktemp("pair")
    return write_checkpoint(folder / "target", seed=1), write_checkpoint(folder / "draft", seed=2)


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    """Runs the command in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def target_alone(folder: Path, prompt: str, max_new_tokens: int) -> list[int]:
    """Greedy tokens of the target by litgpt's own model and loop, float32."""
    config = Config.from_file(folder / "model_config.yaml")
    model = GPT(config)
    state = torch.load(folder / "lit_model.pth", weights_only=True)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    ids = Tokenizer(folder).encode(prompt)
    model.max_seq_length = len(ids) + max_new_tokens
    model.set_kv_cache(1)
    eos = Tokenizer(folder).eos_id
    out = litgpt_generate(model.eval(), ids, len(ids) + max_new_tokens, temperature=0.0, eos_id=eos)
    out = out[len(ids) :].tolist()
    return out[: out.index(eos)] if eos in out else out


def test_the_embedded_pair_prints_the_text_of_the_target_alone() -> None:
    command = [*LITSPEC, "generate", "--prompt", PROMPT, "--temperature", "0", "--output_format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout)
    assert record["token_ids"] == target_alone(DEMO_TARGET, PROMPT, 50)
    assert record["prompt"] == PROMPT
    assert record["finish_reason"] in ("stop", "length")
    expected = {"new_tokens", "rounds", "proposed", "accepted", "acceptance_rate", "mean_acceptance_length"}
    expected |= {"prefill_seconds", "decode_seconds", "tokens_per_second"}
    assert expected <= set(record["stats"])
    assert record["stats"]["new_tokens"] == len(record["token_ids"])
    assert "embedded" in done.stderr and "acceptance rate" in done.stderr


def test_text_and_json_hold_the_same_text(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    flags = ["generate", "--checkpoint_dir", pair[0], "--draft_dir", pair[1], "--prompt", "abc", "--max_new_tokens", 30]
    code, text, _ = run(capsys, *flags)
    assert code == 0
    code, line, _ = run(capsys, *flags, "--output_format", "json")
    assert code == 0
    assert text == json.loads(line)["text"] + "\n"
    code, with_prompt, _ = run(capsys, *flags, "--include_prompt", "true")
    assert with_prompt == "abc" + text


def test_samples_differ_and_a_seed_repeats_them(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    flags = ["generate", "--checkpoint_dir", pair[0], "--draft_dir", pair[1], "--num_samples", 3]
    flags += ["--output_format", "json", "--max_new_tokens", 12]
    first = [json.loads(line)["token_ids"] for line in run(capsys, *flags)[1].splitlines()]
    again = [json.loads(line)["token_ids"] for line in run(capsys, *flags)[1].splitlines()]
    other = [json.loads(line)["token_ids"] for line in run(capsys, *flags, "--seed", 5)[1].splitlines()]
    assert len(first) == 3 and len({tuple(ids) for ids in first}) == 3
    assert again == first
    assert other != first


@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup", "early_exit", "none"])
def test_every_drafter_gives_the_text_of_the_target_alone(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], drafter: str
) -> None:
    flags = ["generate", "--checkpoint_dir", pair[0], "--prompt", "abcabcabc", "--temperature", 0]
    flags += ["--output_format", "json", "--drafter", drafter]
    flags += ["--draft_dir", pair[1]] if drafter == "draft_model" else []
    code, out, _ = run(capsys, *flags)
    assert code == 0
    assert json.loads(out)["token_ids"] == target_alone(pair[0], "abcabcabc", 50)


def test_values_come_from_a_config_file_and_flags_win(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"checkpoint_dir: {pair[0]}\nmax_new_tokens: 7\ntemperature: 0.0\noutput_format: json\n")
    code, out, _ = run(capsys, "generate", "--config", config, "--prompt", "abc")
    assert code == 0 and len(json.loads(out)["token_ids"]) == 7
    code, out, _ = run(capsys, "generate", "--config", config, "--prompt", "abc", "--max_new_tokens", 9)
    assert code == 0 and len(json.loads(out)["token_ids"]) == 9


def test_stop_strings_repeat_and_cut_the_text(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    flags = ["generate", "--checkpoint_dir", pair[0], "--prompt", "abc", "--temperature", 0, "--output_format", "json"]
    whole = json.loads(run(capsys, *flags)[1])["text"]
    late, early = whole[30:32], whole[10:12]
    code, out, _ = run(capsys, *flags, f"--stop={late}", f"--stop={early}")
    record = json.loads(out)
    assert code == 0 and record["finish_reason"] == "stop"
    assert record["text"] == whole[: min(whole.index(late), whole.index(early))]


def test_eos_ids_of_generation_config_stop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = lively_weights(tiny_config(), seed=3)
    plain = write_checkpoint(tmp_path / "plain", weights=weights)
    flags = ["generate", "--prompt", "abc", "--temperature", 0, "--output_format", "json"]
    ids = json.loads(run(capsys, *flags, "--checkpoint_dir", plain)[1])["token_ids"]
    stop_at = next(i for i, token in enumerate(ids) if i > 3 and token not in ids[:i])
    both = {"eos_token_id": [263, ids[stop_at]]}
    stopping = write_checkpoint(tmp_path / "stopping", weights=weights, generation_config=both)
    record = json.loads(run(capsys, *flags, "--checkpoint_dir", stopping)[1])
    assert record["token_ids"] == ids[:stop_at]
    assert record["finish_reason"] == "stop"


def one_sentence(err: str) -> str:
    """The last line of stderr, which must be the only one that is not about what was loaded."""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("litspec:")]
    assert len(lines) == 1, err
    return lines[0]


def test_bad_input_exits_2_with_a_sentence_that_names_it(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = pair
    other_tokenizer = byte_level_tokenizer(words=("hello",))
    foreign = write_checkpoint(tmp_path / "foreign", tokenizer=other_tokenizer)
    hugging_face = tmp_path / "hf"
    hugging_face.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (hugging_face / name).write_text("{}")
    truncated = write_checkpoint(tmp_path / "truncated")
    weights = (truncated / "lit_model.pth").read_bytes()
    (truncated / "lit_model.pth").write_bytes(weights[: len(weights) // 2])
    lora = write_checkpoint(tmp_path / "lora")
    (lora / "lit_model.pth").rename(lora / "lit_model.pth.lora")

    (tmp_path / "prompts.txt").write_text("a\n")
    job = ["--checkpoint_dir", target, "--prompts_file", tmp_path / "prompts.txt", "--out_file", tmp_path / "out.jsonl"]
    cases = [
        (["--checkpoint_dir", tmp_path / "missing"], ["missing"]),
        (["--checkpoint_dir", hugging_face], ["litgpt convert_to_litgpt"]),
        (["--checkpoint_dir", truncated], ["lit_model.pth"]),
        (["--checkpoint_dir", lora], ["litgpt merge_lora"]),
        (["--checkpoint_dir", target, "--draft_dir", tmp_path / "nodraft"], ["draft_dir", "nodraft"]),
        (["--checkpoint_dir", target, "--draft_dir", foreign], ["token"]),
        (["--draft_dir", draft], ["checkpoint_dir"]),
        (["--checkpoint_dir", target, "--max_new_tokens", 300], ["300", "256"]),
        (["--checkpoint_dir", target, "--max_new_tokens", 0], ["max_new_tokens", "0"]),
        (["--checkpoint_dir", target, "--temperature", -1], ["temperature", "-1"]),
        (["--checkpoint_dir", target, "--top_p", 1.5], ["top_p", "1.5"]),
        (["--checkpoint_dir", target, "--top_k", 0], ["top_k", "0"]),
        (["--checkpoint_dir", target, "--speculative_k", -2], ["speculative_k", "-2"]),
        (["--checkpoint_dir", target, "--draft_dir", draft, "--speculative_k", 9], ["speculative_k", "9", "10"]),
        (["--checkpoint_dir", target, "--num_samples", 0], ["num_samples", "0"]),
        (["--checkpoint_dir", target, "--drafter", "draft_model"], ["draft_dir"]),
        (["--checkpoint_dir", target, "--verify_width", 0], ["verify_width", "0"]),
        (["--checkpoint_dir", target, "--prompt", ""], ["prompt"]),
        (["--checkpoint_dir", target, "--stop="], ["stop"]),
        (["--checkpoint_dir", target, "--temperature", "hot"], ["temperature", "hot"]),
        (["--checkpoint_dir", target, "--no_such_flag", 1], ["no_such_flag"]),
        (["--drafter", "magic"], ["drafter must be 'auto', 'draft_model'", "prompt_lookup", "'magic'"]),
        (["--precision", "64"], ["precision must be ", "bf16-true", "null", "64"]),
        (["--speculative_k", "few"], ["speculative_k must be a whole number or 'auto'", "few"]),
        (["--config", tmp_path / "nowhere.yaml"], ["nowhere.yaml"]),
        ([*job, "--prompt", "Hello"], ["prompt", "Hello", "prompts_file"]),
        ([*job, "--include_prompt", "true"], ["include_prompt", "prompts_file"]),
        ([*job, "--output_format", "json"], ["output_format", "json", "prompts_file"]),
    ]
    for flags, named in cases:
        code, out, err = run(capsys, "generate", *flags)
        sentence = one_sentence(err)
        assert code == 2, flags
        assert out == "", flags
        for word in named:
            assert word in sentence, (flags, sentence)


def test_logits_that_are_not_finite_end_with_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = write_checkpoint(tmp_path / "broken")
    state = torch.load(broken / "lit_model.pth", weights_only=True)
    state["lm_head.weight"][5] = float("nan")
    torch.save(state, broken / "lit_model.pth")
    code, _, err = run(capsys, "generate", "--checkpoint_dir", broken, "--prompt", "abc")
    assert code == 2
    assert "position" in one_sentence(err)


def test_help_and_version_import_neither_torch_nor_litgpt() -> None:
    for flags in (["--help"], ["--version"], ["generate", "--help"]):
        code = (
            "import sys\n"
            "from litspec.__main__ import main\n"
            "try:\n"
            f"    main({flags})\n"
            "except SystemExit as error:\n"
            "    assert not error.code, error.code\n"
            "heavy = {'torch', 'litgpt', 'lightning', 'transformers'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (__version__ if flags == ["--version"] else "usage") in done.stdout


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    flags = [line.strip() for line in out.split("options:")[1].splitlines() if line.strip().startswith("--")]
    assert len(flags) > 20
    # A flag without a description is followed at once by its type and default.
    text = " ".join(out.split("options:")[1].split())
    for flag in flags:
        name, value = flag.split()[0], " ".join(flag.split()[1:2])
        assert not text.split(f"{name} {value}".strip(), 1)[1].lstrip().startswith("(type:"), name


LONG = ["generate", "--prompt", PROMPT, "--max_new_tokens", "900", "--temperature", "1.0", "--drafter", "none"]


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_printed_and_exits_130() -> None:
    process = subprocess.Popen([*LITSPEC, *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first and (first + out).endswith("\n")
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly() -> None:
    process = subprocess.Popen([*LITSPEC, *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert "Traceback" not in err and "BrokenPipe" not in err


def test_a_draft_with_another_padded_vocabulary_works(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    wide = write_checkpoint(tmp_path / "wide", tiny_config(padded_vocab_size=320), seed=4)
    for target, draft in ((pair[0], wide), (wide, pair[0])):
        flags = ["--checkpoint_dir", target, "--draft_dir", draft, "--prompt", "abc", "--temperature", 0]
        code, out, _ = run(capsys, "generate", *flags, "--output_format", "json")
        assert code == 0
        assert json.loads(out)["token_ids"] == target_alone(target, "abc", 50)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_stdout_that_lacks_a_character_loses_no_text(
    pair: tuple[Path, Path], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["generate", "--checkpoint_dir", str(pair[0]), "--prompt", "\u2603 abc", "--include_prompt"]

    def stdout(stdout_encoding: str, *more: str) -> str:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=stdout_encoding))
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*flags, *more])
        return sys.stdout.buffer.getvalue().decode(stdout_encoding)

    whole = stdout("utf-8")
    assert "\u2603" in whole and "\ufffd" in whole
    assert stdout(encoding) == whole.encode(encoding, errors="replace").decode(encoding)
    record = json.loads(stdout(encoding, "--output_format", "json"))
    assert record["prompt"] == "\u2603 abc" and record["text"] + "\n" == whole
