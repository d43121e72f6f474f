"""Hugging Face folders: recognized by their sizes, converted on request, with the same model as result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import litgpt.config
import pytest
import torch
from checkpoints import EOS, byte_level_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.checkpoint import open_checkpoint
from litspec.convert import command_for, model_name
from litspec.errors import InputError

SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=264,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
OURS: dict[str, Any] = dict(
    block_size=256,
    vocab_size=264,
    padded_vocab_size=264,
    n_layer=2,
    n_head=4,
    n_query_groups=2,
    n_embd=32,
    intermediate_size=64,
    rotary_percentage=1.0,
    parallel_residual=False,
    bias=False,
    norm_class_name="RMSNorm",
    mlp_class_name="LLaMAMLP",
    norm_eps=1e-6,
)
MODELS = {
    "Nano-Llama": (LlamaForCausalLM, LlamaConfig, {}),
    "Qwen2.5-Nano": (Qwen2ForCausalLM, Qwen2Config, {"attn_bias": True}),
}


@pytest.fixture(params=list(MODELS))
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of a known family, with sizes that LitGPT does not have."""
    found: str = request.param
    config = OURS | MODELS[found][2] | {"name": found, "hf_config": {"org": "nobody", "name": found}}
    monkeypatch.setitem(litgpt.config.name_to_config, found, config)
    return found


def write(folder: Path, name: str, **sizes: Any) -> Any:
    """A random model as transformers saves it."""
    model_class, config_class, _ = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = model_class(config_class(**(SIZES | {"rms_norm_eps": 1e-6} | sizes))).eval()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token=EOS).save_pretrained(folder)
    return model


@pytest.mark.slow
def test_a_folder_is_converted_when_asked_and_gives_the_models_text(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "any name"
    model = write(folder, name)
    with pytest.raises(InputError, match=f"--model_name {name}`, or have it converted with `--convert true`"):
        SpecLLM.load(folder)
    assert not (folder / "lit_model.pth").exists()
    llm = SpecLLM.load(folder, convert=True, drafter="prompt_lookup", precision="32-true")
    assert (folder / "lit_model.pth").is_file() and (folder / "model_config.yaml").is_file()
    out = llm.generate("abcabc", max_new_tokens=16, temperature=0.0)
    ids = llm.codec.encode("abcabc").long()[None]
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=256
    )[0]
    new = expected[ids.size(1) :].tolist()
    assert out.token_ids == (new[: new.index(256)] if 256 in new else new)
    written = (folder / "lit_model.pth").stat().st_mtime_ns
    SpecLLM.load(folder, convert=True)
    assert (folder / "lit_model.pth").stat().st_mtime_ns == written


def test_a_model_of_other_sizes_is_unknown_to_litgpt(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "other"
    write(folder, name, hidden_size=40)
    assert model_name(folder) is None
    with pytest.raises(InputError, match=r"names .*ForCausalLM with hidden_size 40.*none of the models"):
        SpecLLM.load(folder, convert=True)
    assert not (folder / "lit_model.pth").exists() and not (folder / "model_config.yaml").exists()


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "broken"
    write(folder, name)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=f"cannot be converted as LitGPT's {name}"):
        SpecLLM.load(folder, convert=True)
    assert not (folder / "lit_model.pth").exists() and not (folder / "model_config.yaml").exists()


def test_without_asking_nothing_is_converted_and_ranks_never_do(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="not yet converted"):
        open_checkpoint(tmp_path / "a", may_convert=True)


@pytest.mark.slow
def test_a_job_converts_before_it_reads_what_decides_its_texts(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", name)
    (tmp_path / "prompts.txt").write_text("abc\n")
    flags = ["--checkpoint_dir", tmp_path / "a", "--prompts_file", tmp_path / "prompts.txt", "--max_new_tokens", 4]
    with pytest.raises(SystemExit) as exit_:
        main(["generate", *map(str, flags), "--out_file", str(tmp_path / "out.jsonl"), "--convert", "true"])
    assert exit_.value.code == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def hub(architecture: str, *sizes: int, vocab_size: int, rope_theta: float, **more: Any) -> dict[str, Any]:
    """A config.json as on the hub."""
    found = {"architectures": [architecture], "vocab_size": vocab_size, "rope_theta": rope_theta}
    return found | dict(zip(NAMES, sizes)) | more


LLAMA = hub("LlamaForCausalLM", 4096, 32, 32, 8, 14336, vocab_size=128256, rope_theta=5e5, rope_scaling={"factor": 8.0})
QWEN2 = hub("Qwen2ForCausalLM", 896, 24, 14, 2, 4864, vocab_size=151936, rope_theta=1e6, max_position_embeddings=32768)
SMOL = hub("LlamaForCausalLM", 576, 30, 9, 3, 1536, vocab_size=49152, rope_theta=1e5)
QWEN3 = hub("Qwen3ForCausalLM", 1024, 28, 16, 8, 3072, vocab_size=151936, rope_theta=1e6, head_dim=128)
REAL = [
    ("Meta-Llama-3.1-8B-Instruct", LLAMA, "Llama-3.1-8B-Instruct"),
    ("snapshot", QWEN2, "Qwen2.5-0.5B"),
    ("x", SMOL, "SmolLM2-135M"),
    ("x", QWEN3, "Qwen3-0.6B"),
]


@pytest.mark.parametrize("folder, config, expected", REAL, ids=[case[2] for case in REAL])
@pytest.mark.parametrize("tuned", [False, True])
def test_models_of_the_hub_are_found_by_their_sizes(
    tmp_path: Path, folder: str, config: dict[str, Any], expected: str, tuned: bool
) -> None:
    path = tmp_path / folder
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"} if tuned else {}))
    found = model_name(path)
    if tuned and expected != "Qwen3-0.6B" and not expected.endswith("Instruct"):
        expected += "-Instruct"
    assert found is not None and found.removesuffix("-Base") == expected, found
    assert f"litgpt convert_to_litgpt {path} --model_name {found}" in command_for(path)


@pytest.mark.parametrize(
    "given, said",
    [
        ("meta-llama/Llama-3.2-1B-Instruct", "litgpt download meta-llama/Llama-3.2-1B-Instruct`"),
        ("checkpoints/HuggingFaceTB/SmolLM2-135M", "litgpt download HuggingFaceTB/SmolLM2-135M`"),
        ("nobody/nothing", "litgpt download ORG/NAME`"),
    ],
)
def test_a_missing_folder_names_the_download(given: str, said: str) -> None:
    with pytest.raises(InputError, match="does not exist") as error:
        open_checkpoint(given)
    assert said in str(error.value)
