"""Checkpoint folders: reading, errors, and checks of pairs."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import litgpt.model
import pytest
import sentencepiece
import torch
from checkpoints import random_weights, tiny_config, write_checkpoint
from litgpt.config import Config, configs
from litgpt.parser_config import parser_commands
from litgpt.utils import save_config
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

from litspec.checkpoint import Checkpoint, check_pair, load_weights, open_checkpoint, read_state_dict
from litspec.errors import InputError
from litspec.model import GPT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


def refusal(action: Callable[[], Any], *parts: str) -> str:
    """The error message of an action, one sentence; it contains the given parts."""
    with pytest.raises(InputError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 500, message
    for part in parts:
        assert part in message, message
    return message


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_as_litgpt_writes_it_is_opened(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dir == folder
    assert checkpoint.weights == folder / "lit_model.pth"
    assert checkpoint.config == tiny_config()


def test_a_bare_name_is_looked_for_in_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "checkpoints" / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/tiny").dir == Path("checkpoints/org/tiny")
    assert open_checkpoint("checkpoints/org/tiny").dir == Path("checkpoints/org/tiny")
    refusal(lambda: open_checkpoint("org/other", role="draft_dir"), "draft_dir 'org/other'", "in ./checkpoints")


def test_a_path_that_is_not_a_folder_is_refused(folder: Path) -> None:
    refusal(lambda: open_checkpoint(folder / "nowhere", role="draft_dir"), "draft_dir", "nowhere", "does not exist")
    refusal(lambda: open_checkpoint(folder / "lit_model.pth"), "is a file", repr(str(folder)))
    refusal(lambda: open_checkpoint(folder / "lit_model.pth" / "x"), "checkpoint_dir", "x")
    refusal(lambda: open_checkpoint(""), "checkpoint_dir is ''")
    refusal(lambda: open_checkpoint("a\0b"), "checkpoint_dir is")
    refusal(lambda: open_checkpoint("a" * 300), "checkpoint_dir")


@pytest.mark.parametrize("name", ["model_config.yaml", "tokenizer.json", "tokenizer_config.json", "lit_model.pth"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refusal(lambda: open_checkpoint(folder), "checkpoint_dir", str(folder), f"has no {name}")


@contextmanager
def another_user() -> Iterator[None]:
    """Permissions do not apply to root, so tests that need them run as user nobody then."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX permissions")
@pytest.mark.parametrize("name", [".", "lit_model.pth", "model_config.yaml", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_an_unreadable_file_is_named(name: str, mode: int) -> None:
    root = Path(tempfile.mkdtemp())  # not tmp_path, whose parents another user may not enter
    try:
        root.chmod(0o755)
        folder = write_checkpoint(root / "tiny")
        folder.chmod(0o755)
        if name != "." and mode == 0o444:
            with another_user():
                assert open_checkpoint(folder).config == tiny_config()
            return
        (folder / name).chmod(mode)
        with another_user():
            refusal(lambda: open_checkpoint(folder), str(folder / name), "checkpoint_dir", "Permission denied")
    finally:
        (root / "tiny").chmod(0o755)
        shutil.rmtree(root)


def lora(folder: Path) -> None:
    (folder / "lit_model.pth").rename(folder / "lit_model.pth.lora")


def adapter(folder: Path) -> None:
    (folder / "lit_model.pth").rename(folder / "lit_model.pth.adapter_v2")


def hugging_face(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"x")


def training_run(folder: Path) -> None:
    (folder / "final").mkdir()
    (folder / "lit_model.pth").rename(folder / "final" / "lit_model.pth")


def renamed(folder: Path) -> None:
    (folder / "lit_model.pth").rename(folder / "step-000100.pth")


def sharded(folder: Path) -> None:
    (folder / "lit_model.pth").unlink()
    (folder / "lit_model.pth").mkdir()
    (folder / "lit_model.pth" / "__0_0.distcp").write_bytes(b"x")


def emptied(folder: Path) -> None:
    (folder / "lit_model.pth").write_bytes(b"")


def lfs_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"
    (folder / "lit_model.pth").write_text(text)


def truncated(folder: Path) -> None:
    path = folder / "lit_model.pth"
    path.write_bytes(path.read_bytes()[:-1000])


def safetensors(folder: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, folder / "lit_model.pth")


def old_format(folder: Path) -> None:
    torch.save(random_weights(tiny_config()), folder / "lit_model.pth", _use_new_zipfile_serialization=False)


def text_file(folder: Path) -> None:
    (folder / "lit_model.pth").write_text("<html>404</html>")


@pytest.mark.parametrize(
    "spoil, parts",
    [
        (lora, ["lit_model.pth.lora", "`litgpt merge_lora"]),
        (adapter, ["lit_model.pth.adapter_v2", "adapter weights"]),
        (hugging_face, ["Hugging Face folder not yet converted", "`litgpt convert_to_litgpt"]),
        (training_run, ["subfolder", "final"]),
        (renamed, ["step-000100.pth"]),
        (sharded, ["lit_model.pth", "is a folder", "`fabric consolidate"]),
        (emptied, ["lit_model.pth", "0 bytes"]),
        (lfs_pointer, ["lit_model.pth", "Git LFS pointer"]),
        (truncated, ["lit_model.pth", "truncated"]),
        (safetensors, ["lit_model.pth", "safetensors", "`litgpt convert_to_litgpt"]),
        (old_format, ["lit_model.pth", "before 1.6"]),
        (text_file, ["lit_model.pth", "not a PyTorch file"]),
    ],
)
def test_other_weight_formats_are_recognized(folder: Path, spoil: Callable[[Path], None], parts: list[str]) -> None:
    spoil(folder)
    refusal(lambda: open_checkpoint(folder, role="draft_dir"), str(folder), "draft_dir", *parts)


def test_the_commands_that_errors_recommend_exist() -> None:
    assert {"convert_to_litgpt", "merge_lora", "convert_pretrained_checkpoint", "download"} <= set(parser_commands())


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, parts",
    [
        ("n_layer: [2", ["not valid YAML", "line"]),
        ("!!python/object/apply:os.system ['true']", ["not valid YAML"]),
        ("", ["holds nothing"]),
        ("- 1", ["holds a list"]),
        ("just words", ["holds a str"]),
        ("n_layers: 2", ["'n_layers'", "does not know"]),
        ("1: 2", ["field 1,"]),
        ("n_layer: two", ["n_layer: 'two'", "int"]),
        ("n_layer: 2.5", ["n_layer: 2.5"]),
        ("n_layer: true", ["n_layer: True"]),
        ("n_layer: -1", ["n_layer: -1", "at least 1"]),
        ("n_head: 0", ["n_head: 0", "at least 1"]),
        ("norm_eps: 1e-5", ["norm_eps: '1e-5'", "float"]),
        ("norm_class_name: BatchNorm", ["norm_class_name: 'BatchNorm'", "RMSNorm"]),
        ("sliding_window_indices: [0, x]", ["sliding_window_indices"]),
        ("rope_adjustments: 8", ["rope_adjustments: 8", "dict"]),
        ("{n_embd: 30, n_head: 4}", ["n_embd % n_head == 0"]),
        ("{n_embd: 32, n_head: 4, n_query_groups: 3}", ["n_head % n_query_groups == 0"]),
        ("mlp_class_name: LLaMAMLP", ["intermediate_size"]),
        ("hf_config: null", ["hf_config: None"]),
    ],
)
def test_an_invalid_config_is_refused(folder: Path, text: str, parts: list[str]) -> None:
    (folder / "model_config.yaml").write_text(text)
    refusal(lambda: open_checkpoint(folder), str(folder / "model_config.yaml"), "checkpoint_dir", *parts)


def test_a_config_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / "model_config.yaml").write_bytes(b"name: \xff\xfe\x00")
    refusal(lambda: open_checkpoint(folder), str(folder / "model_config.yaml"), "cannot be read")


def test_every_config_that_litgpt_ships_is_read_back_as_it_was(folder: Path) -> None:
    for fields in configs[::9]:
        config = Config(**fields)
        save_config(config, folder)
        assert open_checkpoint(folder).config == config
    # All of them, without the detour by way of the slow YAML reader.
    from litspec.checkpoint import _has_type

    hints = {name: field.type for name, field in Config.__dataclass_fields__.items()}
    for fields in configs:
        for name, value in asdict(Config(**fields)).items():
            assert _has_type(value, hints[name]), (fields["name"], name, value)


# --- the weights ------------------------------------------------------------------------------------------------------


def saved(folder: Path, content: Any) -> Checkpoint:
    torch.save(content, folder / "lit_model.pth")
    return open_checkpoint(folder)


@pytest.mark.parametrize("wrapped", [False, True])
def test_both_forms_of_a_state_dict_are_read(tmp_path: Path, wrapped: bool) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", wrapped=wrapped, seed=3))
    expected = random_weights(tiny_config(), seed=3)
    got = read_state_dict(checkpoint)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(folder: Path, tmp_path: Path) -> None:
    for content in (RunsCode(tmp_path / "ran"), {"model": RunsCode(tmp_path / "ran")}):
        checkpoint = saved(folder, content)
        refusal(partial(read_state_dict, checkpoint), str(folder / "lit_model.pth"), "would run code", "system")
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "lit_model.pth", weights_only=False)  # it does run without weights_only
    assert (tmp_path / "ran").exists()


def test_a_training_state_is_recognized(folder: Path) -> None:
    weights = random_weights(tiny_config())
    command = "`litgpt convert_pretrained_checkpoint"
    refusal(
        lambda: read_state_dict(saved(folder, {"model": weights, "optimizer": {}, "iter_num": 3})), "optimizer", command
    )
    state = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).state_dict()
    refusal(lambda: read_state_dict(saved(folder, state)), "state of an optimizer")
    refusal(lambda: read_state_dict(saved(folder, {"model": weights, "hparams": tiny_config()})), "litgpt.", command)
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    refusal(lambda: read_state_dict(saved(folder, {"model": compiled})), "_orig_mod.", command)


@pytest.mark.parametrize(
    "content, parts",
    [
        ({"model.embed_tokens.weight": torch.zeros(1)}, ["model.embed_tokens.weight", "`litgpt convert_to_litgpt"]),
        ({"gpt_neox.embed_in.weight": torch.zeros(1)}, ["gpt_neox", "`litgpt convert_to_litgpt"]),
        ({"transformer.wpe.weight": torch.zeros(1)}, ["transformer.wpe", "`litgpt convert_to_litgpt"]),
        ({"transformer.h.0.attn.qkv.lora_A": torch.zeros(1)}, ["lora_A", "`litgpt merge_lora"]),
        ({"conv1.weight": torch.zeros(1)}, ["conv1.weight", "not LitGPT's names"]),
        ({"state_dict": {"a": torch.zeros(1)}}, ["state_dict", "not LitGPT's names"]),
        ({3: torch.zeros(1)}, ["'3'", "not LitGPT's names"]),
        ({"lm_head.weight": "text"}, ["lm_head.weight", "str"]),
        ({"lm_head.weight": torch.zeros(2, dtype=torch.int8)}, ["lm_head.weight", "int8"]),
        ({}, ["nothing"]),
        ({"model": {}}, ["nothing"]),
        ({"model": 3}, ["int"]),
        ([torch.zeros(1)], ["list"]),
        (torch.zeros(1), ["Tensor"]),
        (None, ["NoneType"]),
    ],
)
def test_weights_by_other_names_are_refused(folder: Path, content: Any, parts: list[str]) -> None:
    refusal(lambda: read_state_dict(saved(folder, content)), str(folder / "lit_model.pth"), "checkpoint_dir", *parts)


def test_damage_anywhere_in_the_file_gives_an_error(folder: Path) -> None:
    path = folder / "lit_model.pth"
    whole = path.read_bytes()
    at = whole.index(b"data.pkl") + 40
    for damaged in (whole[:at] + bytes(400) + whole[at + 400 :], whole[:at] + b"\xff" * 9 + whole[at + 9 :]):
        path.write_bytes(damaged)
        refusal(lambda: read_state_dict(open_checkpoint(folder)), str(path))
    path.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no weights")
    refusal(lambda: read_state_dict(open_checkpoint(folder)), str(path))


# --- loading ----------------------------------------------------------------------------------------------------------


def logits(model: torch.nn.Module, config: Config) -> torch.Tensor:
    tokens = torch.arange(1, 10)[None] % config.vocab_size
    if isinstance(model, GPT):
        with torch.no_grad():
            cache = model.make_cache(16)
            return model.verify(tokens, torch.zeros(1, dtype=torch.int64), cache)[:, -1]
    with torch.no_grad():
        return model(tokens)[:, -1]


def reference(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = litgpt.model.GPT(config)
    model.load_state_dict(random_weights(config, seed=seed, dtype=dtype))
    return model


@pytest.mark.parametrize("kind", [litgpt.model.GPT, GPT])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loaded_model_computes_what_litgpts_does(tmp_path: Path, kind: type, device: str) -> None:
    config = tiny_config()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", config, seed=5, dtype=torch.bfloat16))
    with torch.device(device):
        model = kind(config)
    load_weights(model, checkpoint, dtype=torch.float32)
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
    expected = logits(reference(config, 5, torch.bfloat16), config)
    torch.testing.assert_close(logits(model, config), expected, rtol=1e-5, atol=1e-5)


def test_without_a_dtype_the_models_own_is_kept_and_so_are_its_tables(tmp_path: Path) -> None:
    config = tiny_config()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", config, dtype=torch.float32))
    model = litgpt.model.GPT(config).to(torch.bfloat16)
    model.transformer.wte.weight.requires_grad_(False)
    cos = model.cos.clone()
    load_weights(model, checkpoint)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.cos, cos)
    assert not model.transformer.wte.weight.requires_grad and model.lm_head.weight.requires_grad


def test_experts_and_their_persistent_buffers_are_loaded_too(tmp_path: Path) -> None:
    config = tiny_config(
        mlp_class_name="LLaMAMoE",
        n_expert=4,
        n_expert_per_token=2,
        moe_intermediate_size=16,
        n_expert_groups=2,
        n_topk_groups=1,
        n_topk_scores_per_group=2,
    )
    weights = random_weights(config)
    name = next(name for name in weights if name.endswith("e_score_correction_bias"))
    weights[name] = torch.arange(4.0)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", config, weights=weights))
    with torch.device("meta"):
        model = litgpt.model.GPT(config)
    load_weights(model, checkpoint)
    assert torch.equal(model.state_dict()[name], torch.arange(4.0))


def test_the_interleaved_qkv_of_old_checkpoints_is_reordered(tmp_path: Path) -> None:
    config = tiny_config(attn_bias=True, bias=True)
    old = {name.replace(".attn.qkv.", ".attn.attn."): tensor for name, tensor in random_weights(config).items()}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", config, weights=old))
    expected = litgpt.model.GPT(config)
    expected.load_state_dict(dict(old))
    model = litgpt.model.GPT(config)
    load_weights(model, checkpoint)
    for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("kind", [litgpt.model.GPT, GPT])
def test_weights_that_do_not_fit_name_the_first_parameter_and_change_nothing(folder: Path, kind: type) -> None:
    model = kind(tiny_config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = random_weights(tiny_config())
    name = "transformer.h.1.attn.proj.weight"

    wrong = weights | {name: torch.zeros(32, 48)}
    refusal(lambda: load_weights(model, saved(folder, wrong)), name, "(32, 48)", "(32, 32)", "lit_model.pth")
    less = {key: tensor for key, tensor in weights.items() if key != name}
    refusal(lambda: load_weights(model, saved(folder, less)), name, "lacks")
    more = weights | {"transformer.h.2.norm_1.weight": torch.zeros(32)}
    refusal(lambda: load_weights(model, saved(folder, more)), "transformer.h.2.norm_1.weight", "does not have")
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_a_head_tied_to_the_embedding_stays_one_tensor_after_a_cast(tmp_path: Path) -> None:
    weights = random_weights(tiny_config(), dtype=torch.bfloat16)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "tiny", weights=weights))
    model = GPT(tiny_config())
    load_weights(model, checkpoint, dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()


def test_each_weight_may_have_a_device_of_its_own_and_be_kept_in_part(folder: Path) -> None:
    with torch.device("meta"):
        model = GPT(tiny_config())
    asked = []

    def home(name: str) -> torch.device:
        asked.append(name)
        return torch.device("cpu")

    load_weights(model, open_checkpoint(folder), device=home, part=lambda name, whole: whole[:3])
    weights = random_weights(tiny_config())
    assert sorted(asked) == sorted(weights)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name][:3])


_MEASURE = """
import sys, torch
from litspec.checkpoint import load_weights, open_checkpoint
from litspec.model import GPT

def anonymous_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024

checkpoint = open_checkpoint(sys.argv[1])
with torch.device("meta"):
    model = GPT(checkpoint.config)
seen = []
import litspec.checkpoint as module
replace = module._replace
def watched(*args):
    replace(*args)
    seen.append(anonymous_mb())
module._replace = watched
before = anonymous_mb()
load_weights(model, checkpoint, dtype=getattr(torch, sys.argv[2]))
size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
largest = max(p.numel() * p.element_size() for p in model.parameters()) / 2**20
loaded = anonymous_mb() - before
from litspec.model import packed
pack = packed.PackedLinear.__init__
def watched_pack(*args):
    pack(*args)
    seen.append(anonymous_mb())
packed.PackedLinear.__init__ = watched_pack
packed.GAINS = {getattr(torch, sys.argv[2]): (1, 1)}
peak = max(seen) - before
packed.pack(model, 8)
print(size, largest, peak, loaded, max(seen) - before, anonymous_mb() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
def test_weights_are_never_held_twice(tmp_path: Path) -> None:
    config = tiny_config(n_layer=16, n_embd=768, n_head=12, n_query_groups=4, intermediate_size=2048)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in litgpt.model.GPT(config).state_dict().items()}
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    folder = write_checkpoint(tmp_path / "tiny", config, weights=weights)
    assert (folder / "lit_model.pth").stat().st_size > 180 * 2**20

    def measured(dtype: str) -> list[float]:
        command = [sys.executable, "-c", _MEASURE, str(folder), dtype]
        return [float(x) for x in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]

    size, largest, peak, after, packing, packed = measured("float32")
    assert peak < size + largest + 30 and after < size + 30
    assert packing < size + largest + 30 and packed < size + 30
    size, largest, peak, after, packing, packed = measured("bfloat16")
    assert peak < 30 and after < 30  # mapped, not read
    assert packing < size + 30 and packed < size + 30


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Checkpoint, Checkpoint]]:
    """Writes a target and a draft folder; reading weights is an error from then on."""

    def make(target: dict[str, Any], draft: dict[str, Any]) -> tuple[Checkpoint, Checkpoint]:
        monkeypatch.undo()
        made = []
        for role, options in (("checkpoint_dir", target), ("draft_dir", draft)):
            folder = tmp_path / options.pop("name", role)
            weights = {"lm_head.weight": torch.zeros(1)}
            made.append(open_checkpoint(write_checkpoint(folder, weights=weights, **options), role=role))
        monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a weight was read"))
        return made[0], made[1]

    return make


def word_tokenizer(words: list[str | None], added: list[AddedToken] = ()) -> Tokenizer:
    """A tokenizer with given words at ids 0, 1, ...; None leaves a hole. Added tokens come behind."""
    vocabulary = {word: id_ for id_, word in enumerate(words) if word is not None}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.fixture
def words(pair: Callable[..., Any]) -> Callable[..., Any]:
    plain = {"eos_token": None, "bos_token": None}

    def check(target: Tokenizer, draft: Tokenizer) -> Any:
        options = [{"tokenizer": tokenizer, "tokenizer_config": plain} for tokenizer in (target, draft)]
        return check_pair(*pair(*options))

    return check


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True) for name in names]


@pytest.mark.parametrize("sizes", [(264, 264), (264, 512), (512, 264)])
def test_padded_sizes_may_differ_either_way(pair: Callable[..., Any], sizes: tuple[int, int]) -> None:
    target, draft = pair(*({"config": tiny_config(padded_vocab_size=size)} for size in sizes))
    report = check_pair(target, draft)
    assert (report.shared_vocab_size, report.notes, report.excluded) == (258, (), ())


def test_a_padded_size_below_the_tokenizers_bounds_what_is_shared(pair: Callable[..., Any]) -> None:
    target, draft = pair({}, {"config": tiny_config(vocab_size=200, padded_vocab_size=200)})
    assert check_pair(target, draft).shared_vocab_size == 200


def test_the_first_token_that_differs_is_named_with_both_ids(words: Callable[..., Any]) -> None:
    refusal(
        lambda: words(word_tokenizer(list("abcde")), word_tokenizer(list("abdec"))),
        "'c' is id 2 of the target",
        "the draft has it as id 4",
        "draft_dir",
    )
    refusal(
        lambda: words(word_tokenizer(list("abcde")), word_tokenizer(list("axy"))), "'b' is id 1", "does not have it"
    )


def test_a_token_of_the_smaller_vocabulary_that_the_larger_lacks_is_refused(words: Callable[..., Any]) -> None:
    refusal(
        lambda: words(word_tokenizer(["a", "b", None, "d", "e"]), word_tokenizer(["a", "b", "c"])),
        "'c' is id 2 of the draft",
        "the target does not have it",
    )


def test_more_tokens_at_the_tail_of_either_are_noted_and_not_shared(words: Callable[..., Any]) -> None:
    for first, second, owner in (("abcde", "abc", "target"), ("abc", "abcde", "draft")):
        report = words(word_tokenizer(list(first)), word_tokenizer(list(second)))
        assert (report.shared_vocab_size, report.excluded) == (3, ())
        assert len(report.notes) == 1
        assert f"2 token(s) exist only in the {owner}, first id 3 ('d')" in report.notes[0]


def test_special_tokens_that_differ_are_excluded_and_noted(words: Callable[..., Any]) -> None:
    target = word_tokenizer(list("abc"), special("<1>", "<2>", "<3>", "<4>"))
    draft = word_tokenizer(list("abc"), special("<1>", "<x>", "<3>"))
    report = words(target, draft)
    assert (report.shared_vocab_size, report.excluded) == (6, (4,))
    assert "'<2>' in the target, '<x>' in the draft" in report.notes[0]
    assert "first id 6 ('<4>')" in report.notes[1]


def test_special_tokens_at_swapped_ids_are_both_excluded(words: Callable[..., Any]) -> None:
    report = words(
        word_tokenizer(list("abc"), special("<1>", "<2>")), word_tokenizer(list("abc"), special("<2>", "<1>"))
    )
    assert report.excluded == (3, 4)


def test_an_id_that_one_tokenizer_skips_is_excluded(words: Callable[..., Any]) -> None:
    report = words(word_tokenizer(list("abcde")), word_tokenizer(["a", "b", None, "d"]))
    assert (report.shared_vocab_size, report.excluded) == (4, (2,))


def test_added_tokens_that_stand_for_text_must_agree(words: Callable[..., Any]) -> None:
    target = word_tokenizer(list("abc"), [AddedToken("<tool>", special=False)])
    draft = word_tokenizer(list("abc"), [AddedToken("<other>", special=False)])
    refusal(lambda: words(target, draft), "'<tool>' is id 3 of the target")
    refusal(lambda: words(target, word_tokenizer(list("abcd"))), "'<tool>' is id 3 of the target")


def sentencepiece_model(vocab_size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the llama eats the grass", "llamas like the other llamas", "grass is green"] * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def as_json(model: bytes, added: list[AddedToken] = ()) -> Tokenizer:
    """The `tokenizer.json` of a sentencepiece model, as far as ids go."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = {processor.id_to_piece(id_): id_ for id_ in range(processor.get_piece_size())}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(list(added))
    return tokenizer


def test_sentencepiece_models_are_compared_piece_by_piece_with_each_other_and_with_a_json(tmp_path: Path) -> None:
    small, large = sentencepiece_model(290), sentencepiece_model(300)

    def made(name: str, model: bytes | None = None, tokenizer: Tokenizer | None = None) -> Checkpoint:
        plain = {"eos_token": None, "bos_token": None}
        folder = write_checkpoint(tmp_path / name, tokenizer=tokenizer, tokenizer_config=plain)
        if model is not None:
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer.model").write_bytes(model)
        return open_checkpoint(folder, role=name)

    model = made("model", small)
    assert check_pair(model, made("same", small)).excluded == ()
    assert check_pair(model, made("json", tokenizer=as_json(small))).notes == ()
    longer = made("longer", tokenizer=as_json(small, special("<pad>")))
    assert check_pair(model, longer).shared_vocab_size == check_pair(longer, model).shared_vocab_size == 264
    # Merged pieces of the smaller vocabulary come first in the larger one; the characters after them have other ids.
    refusal(lambda: check_pair(model, made("large", large)), "is id 27", "of the target")


def test_folders_that_disagree_about_bos_give_a_warning(pair: Callable[..., Any]) -> None:
    target, draft = pair({"name": "Llama-3.1-8B"}, {"name": "my-draft"})
    (note,) = check_pair(target, draft).notes
    assert (
        note.startswith("Warning") and "BOS" in note and "for the folder 'Llama-3.1-8B' but not for 'my-draft'" in note
    )
    target, draft = pair({"name": "target2"}, {"name": "draft2", "tokenizer_config": {"add_bos_token": True}})
    (note,) = check_pair(target, draft).notes
    assert "for the folder 'draft2' but not for 'target2'" in note


def test_a_draft_with_a_smaller_block_size_is_noted_with_both_numbers(pair: Callable[..., Any]) -> None:
    sizes = {"config": tiny_config(block_size=4096)}, {"config": tiny_config(block_size=2048)}
    (note,) = check_pair(*pair(*sizes)).notes
    assert "2,048" in note and "4,096" in note
    assert check_pair(*pair({}, {"config": tiny_config(block_size=512)})).notes == ()


def test_a_broken_tokenizer_of_the_draft_names_the_draft(pair: Callable[..., Any]) -> None:
    target, draft = pair({}, {})
    (draft.dir / "tokenizer.json").write_text("{")
    refusal(lambda: check_pair(target, draft), str(draft.dir / "tokenizer.json"), "draft_dir", "cannot be loaded")
