"""The config hub's files: their claims about each pair are recomputed from LitGPT's configs and models."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from litgpt import GPT, Config
from litgpt.config import configs
from litgpt.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
HUB = ROOT / "config_hub" / "generate"
FILES = sorted(HUB.glob("*.yaml"))

PAIRS = {
    "llama-3.1-8b": ("Llama-3.1-8B-Instruct", "Llama-3.2-1B-Instruct"),
    "llama-3.1-70b": ("Llama-3.1-70B-Instruct", "Llama-3.2-1B-Instruct"),
    "llama-3.3-70b": ("Llama-3.3-70B-Instruct", "Llama-3.1-8B-Instruct"),
    "qwen2.5-7b": ("Qwen2.5-7B-Instruct", "Qwen2.5-0.5B-Instruct"),
    "qwen2.5-14b": ("Qwen2.5-14B-Instruct", "Qwen2.5-0.5B-Instruct"),
    "qwen2.5-32b": ("Qwen2.5-32B-Instruct", "Qwen2.5-0.5B-Instruct"),
    "qwen3-8b": ("Qwen3-8B", "Qwen3-0.6B"),
    "qwen3-32b": ("Qwen3-32B", "Qwen3-0.6B"),
    "gemma-2-9b": ("Gemma-2-9b-it", "Gemma-2-2b-it"),
    "gemma-2-27b": ("Gemma-2-27b-it", "Gemma-2-2b-it"),
    "gemma-3-12b": ("Gemma-3-12b-it", "Gemma-3-1b-it"),
    "pythia-6.9b": ("pythia-6.9b", "pythia-160m"),
    "smollm2-1.7b": ("SmolLM2-1.7B-Instruct", "SmolLM2-135M-Instruct"),
}

# Nominal GB of one GPU; each has slightly more than that many 10^9 bytes.
GPU_GB = {"L4": 24, "A100_40GB": 40, "L40S": 48, "A100_80GB": 80, "H100": 80, "RTXP_6000": 96, "H200": 141}
REST_GB = 2  # CUDA's context, activations, logits
ACCEPTANCE = 0.75
LEAST_DRAFT_COST = 0.1  # a step of many small kernels waits for their latency, however few bytes it reads
MAX_K = 7  # rows of a block (8 by default) less the bonus token's

each_file = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


def read_header(path: Path) -> str:
    """The comments at the top, without `#`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line[2:] for line in lines if line.startswith("#"))


def read_claims(path: Path) -> dict:
    _, _, claims = read_header(path).partition("\nclaims:")
    return yaml.safe_load("claims:" + claims)["claims"]


def read_prose(path: Path) -> str:
    """The comments above the claims, as one line."""
    return " ".join(read_header(path).partition("\nclaims:")[0].split())


@cache
def measured(name: str) -> tuple[int, int, int]:
    """Parameters, those of the embedding among them, and bf16 bytes of keys and values per token, of LitGPT's model."""
    with torch.device("meta"):
        model = GPT(Config.from_name(name))
        # LitGPT gives a layer with a sliding window no more room than the window (512 positions at the least here). The
        # files count every position, so the room for one is measured below that length.
        model.set_kv_cache(batch_size=1, max_seq_length=256, dtype=torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    cache_bytes = sum(t.nbytes for block in model.transformer.h for t in (block.attn.kv_cache.k, block.attn.kv_cache.v))
    return parameters, model.transformer.wte.weight.numel(), cache_bytes // 256


def ideal_speedup(k: int, draft_cost: float) -> float:
    """Tokens per round over a round's cost in plain steps (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8)."""
    return (1 - ACCEPTANCE ** (k + 1)) / ((1 - ACCEPTANCE) * (k * draft_cost + 1))


def gb_per_gpu(target: str, draft: str, gpus: int, tokens: int) -> float:
    """Every GPU holds its share of the target's layers, head and cache, the embedding, and the whole of the draft."""
    (t_all, t_embedding, t_cache), (d_all, _, d_cache) = measured(target), measured(draft)
    weights = 2 * ((t_all - t_embedding) / gpus + t_embedding + d_all)
    return (weights + (t_cache / gpus + d_cache) * tokens) / 1e9 + REST_GB


def test_the_hub_has_exactly_one_file_per_pair():
    assert {path.stem: (read_claims(path)["target"], read_claims(path)["draft"]) for path in FILES} == PAIRS


@each_file
def test_parameters_and_bytes_are_those_of_litgpt_models(path):
    claims = read_claims(path)
    (target, _, target_cache), (draft, _, draft_cache) = measured(claims["target"]), measured(claims["draft"])
    assert claims["parameters"] == [target, draft]
    assert claims["weights_gb"] == pytest.approx(2 * (target + draft) / 1e9, abs=0.005)
    assert claims["kv_gb_per_1000_tokens"] == pytest.approx((target_cache + draft_cache) * 1000 / 1e9, abs=0.0005)


@each_file
def test_the_machines_named_hold_the_pair_and_no_smaller_one_does(path):
    claims, settings = read_claims(path), yaml.safe_load(path.read_text())
    gpus = settings["devices"]
    assert settings["placement"] == ("single" if gpus == 1 else "tensor_parallel")
    needed = gb_per_gpu(claims["target"], claims["draft"], gpus, min(8192, *claims["block_size"]))
    assert claims["gb_per_gpu"] == pytest.approx(needed, abs=0.05)
    assert f"with {min(8192, *claims['block_size']):,} tokens" in read_header(path)

    sizes = [GPU_GB[machine.partition("_X_")[0]] for machine in claims["fits"]]
    assert sizes == sorted(sizes) and needed <= sizes[0]
    assert not [gb for gb in GPU_GB.values() if needed <= gb < sizes[0]]
    assert f"of {sizes[0]} GB" in read_prose(path)
    # Each rank takes whole heads and whole groups of keys and values.
    config = Config.from_name(claims["target"])
    assert config.n_head % gpus == 0 and config.n_query_groups % gpus == 0


@each_file
def test_the_machines_named_are_lightning_machines_with_that_many_gpus(path, monkeypatch):
    monkeypatch.setitem(os.environ, "LIGHTNING_DISABLE_VERSION_CHECK", "1")
    machines = pytest.importorskip("lightning_sdk.machine").Machine
    gpus = yaml.safe_load(path.read_text())["devices"]
    assert [getattr(machines, name).accelerator_count for name in read_claims(path)["fits"]] == [gpus] * len(
        read_claims(path)["fits"]
    )


@each_file
def test_k_is_the_smallest_within_two_per_cent_of_the_best_by_the_stated_model(path):
    claims, k = read_claims(path), yaml.safe_load(path.read_text())["speculative_k"]
    # An embedding is looked up, not read; the output head is read.
    target, draft = (measured(claims[role])[0] - measured(claims[role])[1] for role in ("target", "draft"))
    assert claims["draft_cost"] == pytest.approx(draft / target, abs=0.0005)
    counted = max(draft / target, LEAST_DRAFT_COST)
    best = max(ideal_speedup(n, counted) for n in range(1, MAX_K + 1))
    assert k == next(n for n in range(1, MAX_K + 1) if ideal_speedup(n, counted) >= 0.98 * best)
    assert claims["ideal_speedup"] == pytest.approx(ideal_speedup(k, counted), abs=0.005)
    assert claims["ideal_speedup"] > 1.4, "a pair that cannot pay does not belong here"

    prose = read_prose(path)
    assert f"Why k = {k}: a draft step reads {100 * draft / target:.0f} % of the bytes" in prose
    assert ("counted as 10 %" in prose) == (draft / target < LEAST_DRAFT_COST)


@each_file
def test_both_models_of_a_pair_have_one_vocabulary(path, tmp_path):
    claims = read_claims(path)
    target, draft = Config.from_name(claims["target"]), Config.from_name(claims["draft"])
    assert target.hf_config["org"] == draft.hf_config["org"]
    assert target.vocab_size == draft.vocab_size
    assert claims["padded_vocab_size"] == [target.padded_vocab_size, draft.padded_vocab_size]
    if target.padded_vocab_size != draft.padded_vocab_size:
        assert f"{target.padded_vocab_size:,} rows in the target and {draft.padded_vocab_size:,}" in read_prose(path)

    # LitGPT decides by a folder's name whether a prompt begins with BOS; both folders must agree.
    decisions = []
    for config in (target, draft):
        folder = tmp_path / config.hf_config["name"]
        folder.mkdir()
        (folder / "tokenizer_config.json").write_text("{}")
        decisions.append(Tokenizer.check_if_bos_token_used(None, folder))
    assert decisions[0] == decisions[1]


@each_file
def test_a_draft_with_the_shorter_block_is_named_with_the_length_that_it_allows(path):
    claims = read_claims(path)
    target, draft = (Config.from_name(claims[role]).block_size for role in ("target", "draft"))
    assert claims["block_size"] == [target, draft]
    stated = re.search(r"at most ([\d,]+) tokens, the block size of the draft", read_prose(path))
    assert (stated is not None) == (draft < target)
    if stated:
        assert int(stated[1].replace(",", "")) == draft


@each_file
def test_the_folders_are_where_the_download_commands_put_them(path):
    known = {f"{config['hf_config']['org']}/{config['hf_config']['name']}": config["name"] for config in configs}
    settings, claims = yaml.safe_load(path.read_text()), read_claims(path)
    downloads = re.findall(r"^ +litgpt download (\S+)", read_header(path), flags=re.MULTILINE)
    assert [known[repository] for repository in downloads] == [claims["target"], claims["draft"]]
    assert [settings["checkpoint_dir"], settings["draft_dir"]] == [f"checkpoints/{name}" for name in downloads]
    assert f"litspec generate --config {path.relative_to(ROOT).as_posix()} --prompt" in read_prose(path)
    assert settings["precision"] == "bf16-true", "the claims count two bytes a weight"


def parse(*args: str):
    from litspec.__main__ import build_parser

    return build_parser().parse_args(["generate", *args])["generate"]


@pytest.mark.slow
@each_file
def test_the_command_reads_the_file(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    parsed = parse("--config", str(path.relative_to(ROOT)), "--prompt", "What do llamas eat?")
    for name, value in yaml.safe_load(path.read_text()).items():
        # A folder stays relative to where the command runs, not to where the file lies.
        assert (str(parsed[name]) if name.endswith("_dir") else parsed[name]) == value, name
    assert parsed["prompt"] == "What do llamas eat?"
    assert parsed["speculative_k"] <= MAX_K == parsed["verify_width"] - 1


def test_a_flag_overrides_the_file_and_a_key_that_is_no_flag_is_refused(tmp_path):
    path = HUB / "smollm2-1.7b.yaml"
    parsed = parse("--config", str(path), "--speculative_k", "2", "--precision", "32-true", "--accelerator", "cpu")
    assert (parsed["speculative_k"], parsed["precision"], parsed["accelerator"]) == (2, "32-true", "cpu")
    assert parse("--config", str(path), "--speculative_k", "auto")["speculative_k"] == "auto"

    (tmp_path / "typo.yaml").write_text(path.read_text().replace("speculative_k:", "speculativ_k:"))
    with pytest.raises(SystemExit, match="2"):
        parse("--config", str(tmp_path / "typo.yaml"))
