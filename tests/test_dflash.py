"""DFlash drafters draft the same as z-lab's own code after any accepted tokens, and change no text.

The references in `fixtures/dflash` are recorded by `make_dflash_fixtures.py`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import lively_weights, tiny_config, write_checkpoint
from heads import proposals_of, random_dflash
from laws import follows
from litgpt import Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_qwen_3
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.benchmark import measure_parts
from litspec.drafters import Proposal
from litspec.drafters.dflash import DFlash, DFlashSession
from litspec.drafters.dflash_folder import load_dflash, read_config
from litspec.drafters.folders import kind_of
from litspec.engine.target import TargetSession
from litspec.errors import InputError
from litspec.jobs import run_job
from litspec.model import GPT
from litspec.model.dflash import DFlashConfig, DFlashNetwork
from litspec.placement import Single
from litspec.sampling import Distribution, Greedy, Rejection, Sampler, Sampling, make_sampler, processed
from litspec.testing import check_drafter

FIXTURES = Path(__file__).parent / "fixtures" / "dflash"
BLOCK = 6
VERSIONS = ["v1", "v2"]
GREEDY = Sampling(temperature=0)


def target_model() -> GPT:
    """The Qwen3 that the references were recorded with, as LitGPT's conversion reads it."""
    config = Config.from_name(
        "Qwen3-0.6B",
        block_size=512,
        n_layer=4,
        n_embd=16,
        n_head=2,
        n_query_groups=1,
        head_size=8,
        intermediate_size=16,
        vocab_size=48,
        padded_vocab_size=48,
        rope_base=10000,
        norm_eps=1e-6,
    )
    weights: dict[str, Tensor] = {}
    copy_weights_qwen_3(config, {}, weights, load_file(FIXTURES / "target.safetensors"))
    model = GPT(config).eval().requires_grad_(False)
    model.load_state_dict(weights)
    return model


TARGET = target_model()
PLACED = Single(TARGET, None, torch.device("cpu"), verify_width=8)


def reference(version: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / f"{version}.reference.safetensors")


class Text:
    """One text committed to a session as by the engine: the prompt in chunks, then rounds of accept and reject."""

    def __init__(
        self, drafter: DFlash, prompt: Sequence[int], first: int, chunk: int = 512, sampler: Sampler | None = None
    ) -> None:
        self.taps = drafter.taps
        self.target = TargetSession(PLACED, 256)
        self.session: DFlashSession = drafter.start(self.target, 256, sampler or Greedy(GREEDY))
        _, hidden = self.target.prefill(prompt, self.taps)
        hidden = torch.cat((torch.zeros_like(hidden[:1]), hidden))
        tokens = [*prompt, first]
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            self.session.commit(tokens[start:end], start, hidden[start:end])
        self.session.commit([first], len(prompt), hidden[-1:])
        self.anchor, self.position = first, len(prompt)

    def commit(self, proposal: Sequence[int], committed: Sequence[int]) -> None:
        """Verifies a proposal, of which all but the last of `committed` was accepted."""
        _, hidden = self.target.verify(self.anchor, self.position, torch.tensor(proposal), self.taps)
        self.session.commit(committed, self.position + 1, hidden[: len(committed)])
        self.anchor, self.position = committed[-1], self.position + len(committed)


def replay(drafter: DFlash, version: str, chunk: int = 512, sampler: Sampler | None = None) -> Any:
    """Plays the scripted rounds; yields each round's number, its text so far, and what the reference says."""
    recorded = reference(version)
    tokens, anchors = recorded["text"].tolist(), recorded["anchor"].tolist()
    text = Text(drafter, tokens[: anchors[0]], tokens[anchors[0]], chunk, sampler)
    for i, (anchor, accepted) in enumerate(zip(anchors, recorded["accepted"].tolist())):
        assert text.position == anchor
        yield i, text, recorded
        committed = tokens[anchor + 1 : anchor + accepted + 2]
        # After the accepted tokens there are stale entries, which must have no effect.
        text.commit([*committed[:-1], *[9] * (BLOCK - 1 - accepted)], committed)


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("version", [*VERSIONS, "windows"])
def test_logits_are_those_of_dflash_after_any_rounds_and_any_chunks_of_the_prompt(version: str, chunk: int) -> None:
    rounds = 0
    for i, text, recorded in replay(load_dflash(FIXTURES / version, TARGET), version, chunk):
        torch.testing.assert_close(
            text.session.logits(text.anchor, text.position), recorded["logits"][i, 1:], rtol=0, atol=1e-5
        )
        rounds += 1
    assert rounds == 10
    assert recorded["logits"].std() > 0.3  # else everything would be close to everything


@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_drafts_are_those_of_dflash(version: str) -> None:
    compared = 0
    for i, text, recorded in replay(load_dflash(FIXTURES / version, TARGET), version):
        accepted = int(recorded["accepted"][i])
        start = text.position + 1
        drafts = text.session.propose(text.anchor, text.position, BLOCK - 1)
        assert drafts.q is None
        # The reference committed its own drafts wherever its script accepted them.
        assert drafts.tokens[:accepted].tolist() == recorded["text"][start : start + accepted].tolist()
        compared += accepted
    assert compared == 25


class Scripted(Rejection):
    """Draws given tokens, and reports the distribution that it would have drawn from."""

    path: list[int]

    def draw(self, logits: Tensor, position: Any) -> tuple[Tensor, Distribution]:
        return torch.tensor([self.path.pop(0)]), processed(logits, self.sampling)


def test_the_selector_s_distributions_along_a_path_are_those_of_dflash() -> None:
    sampler = Scripted(Sampling())
    for i, text, recorded in replay(load_dflash(FIXTURES / "v2", TARGET), "v2", sampler=sampler):
        sampler.path = recorded["path"][i].tolist()
        proposal = text.session.propose(text.anchor, text.position, BLOCK - 1)
        assert proposal.q is not None and proposal.q.probs.shape == recorded["q"][i].shape
        wanted = torch.zeros(BLOCK - 1, 48).scatter(1, recorded["candidates"][i], recorded["q"][i])
        found = torch.zeros(BLOCK - 1, 48).scatter(1, proposal.q.ids, proposal.q.probs)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_fewer_drafts_are_the_first_of_more(version: str) -> None:
    for _, text, _ in replay(load_dflash(FIXTURES / version, TARGET), version):
        whole = text.session.propose(text.anchor, text.position, BLOCK - 1).tokens
        for k in (1, 3, 20):
            assert torch.equal(text.session.propose(text.anchor, text.position, k).tokens, whole[:k])
        assert text.session.propose(text.anchor, text.position, 0).tokens.tolist() == []


def test_taps_that_are_off_by_one_give_other_drafts() -> None:
    """Shows that logits depend strongly on the target's states, so that the tests above are sensitive."""
    drafter = load_dflash(FIXTURES / "v1", TARGET)
    drafter.taps = tuple(tap + 1 for tap in drafter.taps)
    for i, text, recorded in replay(drafter, "v1"):
        gap = (text.session.logits(text.anchor, text.position) - recorded["logits"][i, 1:]).abs().max()
        assert gap > 0.05


def test_states_that_were_left_out_are_an_error_and_not_wrong_drafts() -> None:
    """A chunked prompt of which only the last chunk is captured, and a restored prefix."""
    drafter = load_dflash(FIXTURES / "v1", TARGET)
    session = drafter.start(TargetSession(PLACED, 64), 64, Greedy(GREEDY))
    with pytest.raises(ValueError, match="from position 16 on, but the next one is 0"):
        session.commit([1] * 8, 16, torch.zeros(8, 48))
    with pytest.raises(ValueError, match="got None"):
        session.commit([1], 0)
    session.commit([1, 2, 3], 0, torch.zeros(3, 48))
    with pytest.raises(ValueError, match="3 committed tokens cannot draft after position 3"):
        session.propose(3, 3, 4)


def test_the_embedding_is_borrowed_raw_and_the_head_with_the_target_s_soft_cap() -> None:
    """Gemma's target scales its embedding and caps its logits; the reference takes the one raw and has no cap here."""
    model = target_model()
    model.config.scale_embeddings = True
    model.config.final_logit_softcapping = 0.5
    drafter = load_dflash(FIXTURES / "v1", model)
    like_gemma = TargetSession(Single(model, None, torch.device("cpu"), verify_width=8), 64)
    recorded = reference("v1")
    n = int(recorded["anchor"][0])
    tokens = recorded["text"][: n + 1].tolist()
    _, hidden = TargetSession(PLACED, 64).prefill(tokens, drafter.taps)
    session = drafter.start(like_gemma, 64, Greedy(GREEDY))
    session.commit(tokens, 0, torch.cat((torch.zeros_like(hidden[:1]), hidden))[:-1])
    capped = 0.5 * torch.tanh(recorded["logits"][0, 1:] / 0.5)
    torch.testing.assert_close(session.logits(tokens[-1], n), capped, rtol=0, atol=1e-5)
    # A cap that the folder names counts instead: version 2 was recorded with one of its own.
    assert load_dflash(FIXTURES / "v2", model).config.softcap == 3.0


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_rotary_scaling_is_that_of_transformers(scaling: dict[str, Any], old: bool) -> None:
    fields = {"rope_theta": 5e5} | scaling
    sizes = dict(head_dim=32, hidden_size=64, num_attention_heads=2)
    rotary = Qwen3RotaryEmbedding(Qwen3Config(**sizes, rope_parameters=dict(fields)))
    cos, sin = rotary(torch.zeros(1), torch.arange(200).unsqueeze(0))
    raw = json.loads((FIXTURES / "v1" / "config.json").read_text()) | sizes
    del raw["rope_parameters"]
    # As transformers wrote it before version 5, and since.
    raw |= {"rope_scaling": scaling, "rope_theta": 5e5} if old else {"rope_parameters": fields}
    found = DFlashNetwork(read_config(raw, "The drafter")).rope_tables(200)
    torch.testing.assert_close(found[0][:, 0], cos[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(found[1][:, 0, 16:], sin[0, :, 16:], rtol=0, atol=2e-5)
    torch.testing.assert_close(found[1][:, 0, :16], -sin[0, :, :16], rtol=0, atol=2e-5)


# ---- published folders ----


def speculators_folder(folder: Path, **changes: Any) -> Path:
    """The recorded version 1 in speculators' format, with a vocabulary of its own 20 ids."""
    folder.mkdir()
    raw = json.loads((FIXTURES / "v1" / "config.json").read_text())
    kept = torch.arange(1, 41, 2)
    weights = load_file(FIXTURES / "v1" / "model.safetensors")
    head = load_file(FIXTURES / "target.safetensors")["lm_head.weight"]
    t2d = torch.zeros(48, dtype=torch.bool)
    t2d[kept] = True
    weights |= {"lm_head.weight": head[kept].clone(), "d2t": kept - torch.arange(20), "t2d": t2d}
    save_file(weights, folder / "model.safetensors")
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {
            name: value
            for name, value in raw.items()
            if name not in ("architectures", "dflash_config", "block_size", "num_target_layers", "is_causal")
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in raw["dflash_config"]["target_layer_ids"]],
        "mask_token_id": raw["dflash_config"]["mask_token_id"],
        "block_size": BLOCK,
        "draft_vocab_size": 20,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_reduced_vocabulary_proposes_target_ids_with_the_logits_of_dflash(tmp_path: Path) -> None:
    drafter = load_dflash(speculators_folder(tmp_path / "head"), TARGET)
    for sampling in (GREEDY, Sampling(temperature=0.7, top_p=0.9)):
        sampler = make_sampler(sampling, seed=1)
        for i, text, recorded in replay(drafter, "v1", sampler=sampler):
            logits = text.session.logits(text.anchor, text.position)
            torch.testing.assert_close(logits[:, 1:41:2], recorded["logits"][i, 1:, 1:41:2], rtol=0, atol=1e-5)
            rest = [j for j in range(48) if j not in range(1, 41, 2)]
            assert (logits[:, rest] == -torch.inf).all()
            tokens, q = text.session.propose(text.anchor, text.position, BLOCK - 1)
            assert set(tokens.tolist()) <= set(range(1, 41, 2))
            if q is not None:
                assert q.probs.shape == (BLOCK - 1, 48)
                torch.testing.assert_close(q.probs, processed(logits, sampling).probs)


def test_sampling_from_the_anchor_proposes_one_more_and_shifts_the_rows(tmp_path: Path) -> None:
    drafter = load_dflash(speculators_folder(tmp_path / "head", sample_from_anchor=True), TARGET)
    assert drafter.max_k == BLOCK
    for i, text, recorded in replay(drafter, "v1"):
        logits = text.session.logits(text.anchor, text.position)
        torch.testing.assert_close(logits[:, 1:41:2], recorded["logits"][i, :, 1:41:2], rtol=0, atol=1e-5)
        assert len(text.session.propose(text.anchor, text.position, 7).tokens) == BLOCK


def test_sliding_layers_of_speculators_look_both_ways_where_they_say_so(tmp_path: Path) -> None:
    default = load_dflash(speculators_folder(tmp_path / "a"), TARGET).config
    assert default.causal == (True, False, True) and default.windows == (8, None, 8)
    both = load_dflash(speculators_folder(tmp_path / "b", sliding_window_non_causal=True), TARGET).config
    assert both.causal == (False, False, False) and both.windows == (8, None, 8)


def test_a_pickle_is_read_as_tensors_only(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    shutil.copy(FIXTURES / "v1" / "config.json", folder)
    weights = load_file(FIXTURES / "v1" / "model.safetensors")
    for new in (True, False):
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
        for name, weight in load_dflash(folder, TARGET).network.state_dict().items():
            assert torch.equal(weight, weights[name])
    torch.save(weights | {"more": SimpleNamespace()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="would run code"):
        load_dflash(folder, TARGET)


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    shutil.copy(FIXTURES / "v2" / "config.json", folder)
    weights = load_file(FIXTURES / "v2" / "model.safetensors")
    names = sorted(weights)
    for i in (0, 1):
        part = {name: weights[name] for name in names[i::2]}
        save_file(part, folder / f"model-0000{i + 1}-of-00002.safetensors")
    whole, parts = load_dflash(FIXTURES / "v2", TARGET).network, load_dflash(folder, TARGET).network
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, parts.state_dict()[name])
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(InputError, match="Git LFS pointer"):
        load_dflash(folder, TARGET)


def test_a_head_given_as_an_object_is_refused_by_another_target(llm: SpecLLM) -> None:
    with pytest.raises(InputError, match=r"hidden size 16, but .* has 192"):
        llm.with_drafter(load_dflash(FIXTURES / "v1", TARGET)).generate("abc", max_new_tokens=4)


def test_weights_are_cast_to_the_target_s_type() -> None:
    model = target_model().to(torch.bfloat16)
    drafter = load_dflash(FIXTURES / "v2", model)
    assert {p.dtype for p in drafter.network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "fields, target, sentence",
    [
        ({"hidden_size": 24}, {}, "hidden size 24, but .* has 16"),
        ({"num_target_layers": 36}, {}, "target of 36 layers, but this target has 4"),
        ({"vocab_size": 151936}, {}, "vocabulary of 151936 entries, but .* has 48"),
        ({"num_target_layers": None, "target_layer_ids": [0, 1, 7]}, {}, r"block 7 \(counted from 0\), but .* has 4"),
        ({"mask_token_id": 48}, {}, "mask_token_id 48, but .* below 48"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, {}, "rope_type 'yarn'"),
        ({"num_hidden_layers": 4, "layer_types": None}, {}, "lacks the weight 'layers.3"),
        ({"intermediate_size": 17}, {}, r"shape \(16, 16\), but its config.json requires \(17, 16\)"),
    ],
)
def test_a_folder_for_another_target_is_refused_with_both_numbers(
    fields: dict[str, Any], target: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = tmp_path / "head"
    shutil.copytree(FIXTURES / "v1", folder)
    config = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        (config["dflash_config"] if name in config["dflash_config"] else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=sentence):
        load_dflash(folder, TARGET)


def test_the_kind_of_a_folder_is_detected_from_its_files(tmp_path: Path) -> None:
    def folder(name: str, config: dict[str, Any] | None, weights: Sequence[str] = ("fc.weight",)) -> Path:
        path = tmp_path / name
        path.mkdir()
        if config is not None:
            (path / "config.json").write_text(json.dumps(config))
        if weights:
            save_file({weight: torch.zeros(1) for weight in weights}, path / "model.safetensors")
        return path

    assert kind_of(FIXTURES / "v1") == kind_of(FIXTURES / "v2") == "dflash"
    assert kind_of(speculators_folder(tmp_path / "s")) == "dflash"
    assert kind_of(folder("a", {"block_size": 8}, ["hidden_norm.weight", "layers.0.mlp.up_proj.weight"])) == "dflash"
    assert kind_of(folder("b", {"architectures": ["LlamaForCausalLMEagle3"]})) == "eagle"
    assert kind_of(folder("c", {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]})) == "eagle"
    assert kind_of(folder("d", {"architectures": ["LlamaForCausalLM"]}, ["midlayer.hidden_norm.weight"])) == "eagle"
    assert kind_of(folder("e", {"architectures": ["Glm4Moe"]}, ["model.layers.9.eh_proj.weight"])) == "mtp"
    assert kind_of(folder("f", {"architectures": ["Qwen3Next"]}, ["mtp.fc.weight", "mtp.norm.weight"])) == "mtp"
    assert kind_of(folder("g", {"architectures": ["LlamaForCausalLM"]}, ["model.embed_tokens.weight"])) == "litgpt"
    assert kind_of(folder("h", {"architectures": ["LlamaForCausalLM"]}, [])) == "litgpt"
    assert kind_of(folder("i", None, [])) == kind_of(tmp_path / "nowhere") == kind_of("") == "litgpt"
    assert kind_of(write_checkpoint(folder("j", {"architectures": ["DFlashDraftModel"]}))) == "litgpt"
    # A target whose folder still holds the files it was converted from, with MTP layers among them, drafts for itself.
    converted = write_checkpoint(folder("l", {"architectures": ["Glm4Moe"]}, ["model.layers.9.eh_proj.weight"]))
    assert kind_of(converted, converted) == "mtp"
    assert kind_of(converted, tmp_path / "j") == kind_of(converted) == "litgpt"
    with pytest.raises(InputError, match="holds a drafter called 'dspark'"):
        kind_of(folder("k", {"speculators_model_type": "dspark"}))


def published_pair(folder: Path) -> tuple[Path, Path]:
    """A random target, and a random DFlash folder for it."""
    config = tiny_config()
    target = write_checkpoint(folder / "target", config, weights=lively_weights(config))
    head = random_dflash(config, folder / "head")
    return target, head


def command(*flags: str) -> Any:
    with pytest.raises(SystemExit) as exit:
        main(flags)
    return exit.value.code


def test_the_command_takes_a_published_folder_as_draft_dir(tmp_path: Path, capsys: Any) -> None:
    target, head = published_pair(tmp_path)
    where = ["--checkpoint_dir", str(target), "--accelerator", "cpu"]
    flags = ["--prompt", "abc", "--max_new_tokens", "30", "--temperature", "0", "--output_format", "json"]
    assert command("generate", *where, *flags, "--drafter", "none") == 0
    alone = json.loads(capsys.readouterr().out)
    assert command("generate", *where, *flags, "--draft_dir", str(head), "--speculative_k", "5") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["token_ids"] == alone["token_ids"]
    assert json.loads(out)["stats"]["proposed"] > 20
    assert "Drafter: dflash." in err

    assert command("generate", *where, "--draft_dir", str(FIXTURES / "v1")) == 2
    sentence = capsys.readouterr().err
    assert "target of 4 layers, but this target has 2" in sentence and "Traceback" not in sentence


@pytest.mark.slow
def test_a_head_on_a_compiled_target_drafts_the_same_and_changes_no_text(tmp_path: Path) -> None:
    llm = SpecLLM.load(*published_pair(tmp_path), accelerator="cpu", verify_width=4, compile=True)
    for settings in (dict(temperature=0), dict(temperature=0.9, top_k=20, sampler="coupled")):
        settings |= dict(max_new_tokens=30, seed=3)
        text = llm.generate("abc", speculative_k=3, **settings)
        assert text.token_ids == llm.with_drafter("none").generate("abc", **settings).token_ids
        assert text.stats.proposed > 30
    # States of a compiled verification differ from others in their last bits only.
    plain = SpecLLM.load(*published_pair(tmp_path / "again"), accelerator="cpu", verify_width=4)
    compiled, uncompiled = (proposals_of(each, each.drafter, ["abc"]) for each in (llm, plain))
    assert compiled == uncompiled and len({tuple(proposal) for proposal in compiled[0]}) > 3


def test_commands_find_the_published_drafter_again_under_the_draft_model_s_name(tmp_path: Path) -> None:
    target, head = published_pair(tmp_path)
    llm = SpecLLM.load(target, head, accelerator="cpu")
    assert llm.draft_name == "dflash" and isinstance(llm.drafter, DFlash)
    for name in ("auto", "draft_model"):
        assert llm.with_drafter("none").with_drafter(name).drafter is llm.drafter
    assert SpecLLM.load(target, accelerator="cpu").draft_name is None
    assert SpecLLM.load(target, head, drafter="prompt_lookup", accelerator="cpu").draft_name is None


def test_a_sampled_job_does_not_go_on_with_another_head(tmp_path: Path) -> None:
    target, head = published_pair(tmp_path)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    load = {"checkpoint_dir": str(target), "draft_dir": str(head), "accelerator": "cpu"}
    settings: dict[str, Any] = dict(max_new_tokens=8, seed=1)
    assert run_job(str(prompts), str(out), load=load, **settings) == 0
    assert run_job(str(prompts), str(out), load=load, **settings) == 0
    weights = load_file(head / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, head / "model.safetensors")
    with pytest.raises(InputError, match="draft_dir changed"):
        run_job(str(prompts), str(out), load=load, **settings)


# ---- the protocol's promises, and the target's own text ----


def random_head(llm: SpecLLM, version: str, seed: int = 0) -> DFlash:
    """Random weights of a head for the embedded target."""
    config = llm.placed.model.config
    extra: dict[str, Any] = dict(conv_kernel_size=2, selector_rank=16, selector_top_k=16) if version == "v2" else {}
    network = DFlashNetwork(
        DFlashConfig(
            n_embd=config.n_embd,
            vocab_size=config.padded_vocab_size,
            intermediate_size=256,
            n_head=6,
            n_query_groups=2,
            head_size=32,
            taps=(3, 8, -1),
            block_size=8,
            mask_token_id=1,
            windows=(None, 40),
            causal=(False, True),
            **extra,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            if p.dim() > 1:
                p.copy_(0.15 * torch.randn(p.shape, generator=generator))
    return DFlash(network)


@pytest.fixture(scope="module")
def llm() -> SpecLLM:
    return SpecLLM.load(drafter="none", precision="32-true")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_head_follows_the_drafter_protocol(llm: SpecLLM, version: str) -> None:
    check_drafter(random_head(llm, version), llm, rounds=3, draws=300)


class Stale(DFlash):
    """Keeps the keys and values of a block that should have been overwritten."""

    def absorb(self, sessions: Any, sizes: Sequence[int], *args: Any) -> None:
        ((session,), (size,)) = sessions, sizes
        start, cache = session.filled, session.pool.cache
        before = [buffer.clone() for buffer in cache.k]
        super().absorb(sessions, sizes, *args)
        if size > 1 and start:
            for buffer, old in zip(cache.k, before):
                buffer[:, :, start : start + size] = old[:, :, start : start + size]


@pytest.mark.slow
def test_a_head_that_keeps_a_block_s_keys_is_found(llm: SpecLLM) -> None:
    with pytest.raises(AssertionError, match="Rollback"):
        check_drafter(Stale(random_head(llm, "v1").network), llm, rounds=4, draws=0)


class Prophet(DFlash):
    """Sometimes proposes the target's next tokens; records the logits of the head's own drafts."""

    answer: list[int]

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> Any:
        self.drafted: list[tuple[int, int, Tensor]] = []
        self._rng = random.Random(5)
        return super().start(target, max_length, sampler)

    def propose_batch(self, sessions: Any, tokens: Any, input_pos: Any, k: Any) -> list[Proposal]:
        (session,), (token,), (place,), (most,) = sessions, tokens, input_pos, k
        self.drafted.append((token, place, session.logits(token, place)))
        ((tokens, _),) = super().propose_batch(sessions, [token], [place], [most])
        right = min(self._rng.randint(0, most), len(self.answer) - place - 1)
        if right > 0:
            tokens[:right] = torch.tensor(self.answer[place + 1 : place + 1 + right])
        return [Proposal(tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [40, 700])
def test_after_a_real_text_every_draft_is_that_of_a_fresh_session_told_the_whole_prefix(
    llm: SpecLLM, size: int
) -> None:
    prompt = ("It was a truth universally known that " * 200)[: 3 * size]
    ids = llm.codec.encode(prompt).tolist()
    assert (len(ids) > 512) == (size == 700)  # more than one chunk of the target's, and of the drafter's
    settings = dict(max_new_tokens=40, temperature=0, speculative_k=6, seed=0)
    alone = llm.generate(prompt, **settings)
    head = Prophet(random_head(llm, "v1").network)
    head.answer = [*ids, *alone.token_ids]
    for _ in range(2):  # the second text finds the prompt's keys in the target's cache
        text = llm.with_drafter(head).generate(prompt, **settings)
        assert text.token_ids == alone.token_ids
        assert 10 < sum(block.accepted for block in text.blocks) < 39
        for token, position, logits in head.drafted[::3]:
            target = TargetSession(llm.placed, position + 1)
            _, hidden = target.prefill(head.answer[:position], head.taps)
            fresh = DFlash(head.network).start(target, position + 1, Greedy(GREEDY))
            fresh.commit(
                head.answer[: position + 1],
                0,
                torch.cat((torch.zeros_like(hidden[:1]), hidden)),
            )
            torch.testing.assert_close(fresh.logits(token, position), logits, rtol=0, atol=1e-3)
            assert logits.std() > 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("version", VERSIONS)
def test_texts_are_the_target_s_own(version: str, precision: str) -> None:
    plain = SpecLLM.load(drafter="none", precision=precision)
    head = SpecLLM.load(drafter=random_head(plain, version), precision=precision)
    for sampling in (
        dict(temperature=0),
        dict(temperature=0.9, sampler="coupled"),
        dict(temperature=0.9, top_k=3, sampler="coupled"),
    ):
        settings = dict(max_new_tokens=30, min_new_tokens=20, seed=3, **sampling)
        alone = plain.generate("It was a truth", **settings)
        for k in (3, 7):
            text = head.generate("It was a truth", speculative_k=k, **settings)
            assert text.token_ids == alone.token_ids
            assert sum(block.proposed for block in text.blocks) > 30


@pytest.mark.slow
def test_bench_times_a_head_with_the_states_that_it_wants(llm: SpecLLM) -> None:
    head = random_head(llm, "v1")
    parts = measure_parts(llm, llm, {"head": head}, GREEDY, list(range(2, 40)), [1, 8], repeats=1)
    assert 0 < parts.draft["head"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@torch.inference_mode()
def test_two_sampled_tokens_have_the_target_s_law_whatever_the_head_drafts(version: str) -> None:
    sampling = Sampling(temperature=1.0, top_k=5)
    sampler = make_sampler(sampling, seed=11)
    drafter = load_dflash(FIXTURES / version, TARGET)
    prompt = [3, 14, 15, 9, 26, 5, 35, 8]
    text = Text(drafter, prompt, 7, sampler=sampler)
    logits: dict[tuple[int, ...], Tensor] = {}

    def after(proposal: Tensor) -> Tensor:
        key = tuple(proposal.tolist())
        if key not in logits:
            logits[key] = text.target.verify(7, len(prompt), proposal)[0][:3]
        return logits[key]

    law = torch.zeros(48, 48)
    for a in range(48):
        rows = after(torch.tensor([a, 0]))
        p = processed(rows, sampling)
        first, second = (torch.zeros(48).scatter(0, p.ids[i], p.probs[i]) for i in (0, 1))
        law[a] = first[a] * second
    draws, accepted = [], 0
    for seed in range(2000):
        sampler.set_seed(seed)
        proposal, q = text.session.propose(7, len(prompt), 2)
        verified = sampler.verify(after(proposal), len(prompt) + 1, proposal, q)
        n = int(verified.accepted)
        accepted += n
        tokens = verified.tokens[: n + 1].tolist()
        if n == 0:
            row = after(torch.tensor([tokens[0], 0]))[1:2]
            tokens.append(int(sampler.draw(row, len(prompt) + 2)[0]))
        draws.append(tokens[:2])
    assert 100 < accepted < 3500
    assert follows(torch.tensor(draws), law)
