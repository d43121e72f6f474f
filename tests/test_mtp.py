"""MTP layers: drafts and logits are those of transformers' `MtpModel`, after any rounds, under each family's names."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import litgpt.model
import pytest
import torch
from checkpoints import lively_weights, tiny_config, write_checkpoint
from heads import Told, bare_target, fixture, proposals_of, random_mtp, write_folder
from host_reads import HostReads
from litgpt.config import Config
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.drafters.mtp import Mtp, load_mtp
from litspec.errors import InputError
from litspec.model import GPT
from litspec.testing import check_drafter

RECORDED, CONFIG = fixture("mtp")
WEIGHTS = {name.removeprefix("weights."): w for name, w in RECORDED.items() if name.startswith("weights.")}
TARGET = bare_target(RECORDED["embed"], RECORDED["head"], n_layer=2)
FIRST = {name: weight for name, weight in WEIGHTS.items() if name.startswith("model.layers.2.")}


def replay(layers: Mtp, kind: str, k: int, chunk: int | None = None) -> None:
    """Plays the recorded rounds and compares."""
    text = Told(layers, TARGET, RECORDED[f"{kind}.tokens"].tolist(), RECORDED[f"{kind}.states"])
    rounds = zip(*(RECORDED[f"{kind}.{name}"] for name in ("known", "drafts", "logits")))
    for known, drafts, logits in rounds:
        text.tell(int(known), chunk)
        for _ in range(2):  # proposing does not change the state
            found, numbers = text.propose(k)
            assert found == drafts[:k].tolist()
            torch.testing.assert_close(numbers, logits[:k], atol=1e-5, rtol=1e-5)


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("kind", ["layers", "short"])
def test_drafts_of_three_layers_are_those_of_transformers_after_scripted_rounds(tmp_path, kind, chunk):
    """Mixtures of experts, norms, biases and partial rotary as in GLM-4.5; "short" has a prompt of one token."""
    layers = load_mtp(write_folder(tmp_path, CONFIG, WEIGHTS), TARGET)
    assert (layers.taps, layers.max_k) == ((-1,), 3)
    replay(layers, kind, 3, chunk)
    for k in (1, 2):
        replay(layers, kind, k, chunk)


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_one_layer_is_used_again_and_again_on_its_own_normed_output(tmp_path, chunk):
    layers = load_mtp(write_folder(tmp_path, CONFIG | {"num_nextn_predict_layers": 1}, FIRST), TARGET)
    assert layers.max_k > 4
    replay(layers, "chain", 4, chunk)


def test_recycling_a_state_that_is_not_normed_would_be_noticed(tmp_path):
    layers = load_mtp(write_folder(tmp_path, CONFIG, FIRST), TARGET)
    ends = layers.ends[0]
    layers.ends = (ends._replace(norm_output=lambda y: y),)
    with pytest.raises(AssertionError):
        replay(layers, "chain", 4)


# --- names ------------------------------------------------------------------------------------------------------------


def dense(count: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return random_mtp(TARGET.config, count)


def renamed(weights: dict[str, Tensor], names: dict[str, str], start: str) -> dict[str, Tensor]:
    found = {}
    for name, weight in weights.items():
        _, _, number, rest = name.split(".", 3)
        part, _, end = rest.rpartition(".")
        found[f"{start}{int(number) - 2}.{names.get(part, part)}.{end}"] = weight
    return found


def drafts(folder: Path, k: int = 4) -> tuple[list[int], Tensor]:
    text = Told(load_mtp(folder, TARGET), TARGET, RECORDED["layers.tokens"].tolist(), RECORDED["layers.states"])
    text.tell(9)
    text.propose(2)
    text.tell(14)
    return text.propose(k)


def test_mimo_s_names_have_the_state_before_the_embedding(tmp_path):
    config, weights = dense(3)
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    mimo = renamed(weights, names | {"shared_head.norm": "final_layernorm"}, "model.mtp_layers.")
    mimo = {name: w.roll(w.size(1) // 2, 1) if "input_proj" in name else w for name, w in mimo.items()}
    expected, logits = drafts(write_folder(tmp_path / "a", config, weights))
    found, numbers = drafts(write_folder(tmp_path / "b", config, mimo))
    assert found == expected and len(found) == 3
    torch.testing.assert_close(numbers, logits)


def test_qwen_s_names_share_what_stands_around_the_block_and_newer_norms_add_one(tmp_path):
    config, weights = dense(1)
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
    around = tuple((names | {"shared_head.norm": "norm"}).values())
    qwen = renamed(weights, names | {"shared_head.norm": "norm"}, "mtp.layers.")
    qwen = {
        name.replace("layers.0.", "") if name.startswith(tuple(f"mtp.layers.0.{part}." for part in around)) else name: w
        for name, w in qwen.items()
    }
    assert "mtp.fc.weight" in qwen and "mtp.layers.0.mlp.up_proj.weight" in qwen
    offset = {name: w - 1 if "norm" in name else w for name, w in qwen.items()}
    expected, logits = drafts(write_folder(tmp_path / "a", config, weights))
    for name, named, fields in (("b", qwen, {}), ("c", offset, {"model_type": "qwen3_next"})):
        found, numbers = drafts(write_folder(tmp_path / name, config | fields, named))
        assert found == expected and len(found) == 4
        torch.testing.assert_close(numbers, logits)


def test_layers_are_found_among_the_target_s_own_and_only_their_files_are_read(tmp_path):
    config, weights = dense(2)
    folder = write_folder(tmp_path, config, {"unused": torch.zeros(1)})
    (folder / "model.safetensors").unlink()
    own = {"model.layers.1.mlp.up_proj.weight": torch.zeros(2), "model.embed_tokens.weight": torch.zeros(2)}
    (folder / "a.safetensors").write_bytes(b"damaged")
    copies = {
        "model.layers.2.shared_head.head.weight": torch.zeros(2),
        "model.layers.3.embed_tokens.weight": torch.zeros(2),
    }
    save_file(weights | own | copies, folder / "b.safetensors")
    places = {name: "b.safetensors" for name in (weights | own | copies)}
    places |= {"model.layers.0.x": "missing.safetensors", "model.layers.0.y": "a.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    plain = write_folder(tmp_path / "plain", config, weights)
    assert drafts(folder)[0] == drafts(plain)[0]


def test_the_command_writes_layers_to_a_folder_that_drafts_alike(tmp_path, capsys):
    config, weights = dense(2)
    own = {"model.layers.1.mlp.up_proj.weight": torch.zeros(2), "lm_head.weight": torch.zeros(2)}
    source = write_folder(
        tmp_path / "hf", config, weights | own | {"model.layers.2.embed_tokens.weight": torch.zeros(2)}
    )
    flags = ["extract_mtp", "--checkpoint_dir", str(source), "--out_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as exit_:
        main(flags)
    assert exit_.value.code == 0 and f"{len(weights)} tensors" in capsys.readouterr().err
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as content:
        assert set(content.keys()) == set(weights)
    assert drafts(tmp_path / "out")[0] == drafts(source)[0]
    with pytest.raises(SystemExit) as exit_:
        main(flags)
    assert exit_.value.code == 2 and "already holds weights (model.safetensors)" in capsys.readouterr().err
    for given, said in ((flags[:3], "out_dir"), ([*flags[:2], str(tmp_path / "no"), *flags[3:]], "(checkpoint_dir)")):
        with pytest.raises(SystemExit) as exit_:
            main(given)
        assert exit_.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 3])
def test_proposing_reads_nothing_to_the_host(tmp_path, count):
    text = Told(
        load_mtp(write_folder(tmp_path, *dense(count)), TARGET),
        TARGET,
        RECORDED["layers.tokens"].tolist(),
        RECORDED["layers.states"],
    )
    text.tell(9)
    with torch.inference_mode(), HostReads() as reads:
        text.session.propose(0, text.known - 1, 3)
        text.tell(12)
        text.session.propose(0, text.known - 1, 3)
    assert reads.seen == []


def test_the_state_before_the_final_norm_may_be_chosen(tmp_path):
    config, weights = dense(1)
    folder = write_folder(tmp_path, config, weights)
    assert load_mtp(folder, TARGET).taps == (-1,)
    assert load_mtp(folder, TARGET, post_norm=False).taps == (1,), "the last of two blocks"


def mla(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"model.layers.2.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2)}


@pytest.mark.parametrize(
    ("fields", "change", "sentence"),
    [
        ({"hidden_size": 32}, dict, "of 32 channels, but the target has 16"),
        ({"num_hidden_layers": 5}, dict, "of 5 layers, but the target has 2"),
        ({"vocab_size": 500}, dict, "vocabulary of 500 ids, but the target has 97"),
        ({}, lambda w: {"model.norm.weight": torch.zeros(2)}, r"no MTP layers; .*'model\.layers\.2\.eh_proj"),
        ({}, mla, "kv_a_proj_with_mqa"),
        (
            {"layer_types": [*["full_attention"] * 2, "sliding_attention"], "sliding_window": 8},
            dict,
            "sliding_window 8",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, dict, "window 8"),
        ({"text_config": "x"}, dict, "text_config as an object, got 'x'"),
        ({}, lambda w: {n.replace("layers.2", "layers.3"): x for n, x in w.items()}, r"it has \[1\]"),
        ({}, lambda w: w | {"model.layers.2.eh_proj.weight": torch.zeros(16, 16)}, r"\(16, 16\); .* need \(16, 32\)"),
        ({}, lambda w: {n: x for n, x in w.items() if "hnorm" not in n}, r"lack 'hnorm\.weight'"),
        ({}, lambda w: {n: x[:5] if "q_proj" in n else x for n, x in w.items()}, "has shape"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence_that_names_both_numbers(tmp_path, fields, change, sentence):
    config, weights = dense(1)
    with pytest.raises(InputError, match=sentence):
        load_mtp(write_folder(tmp_path, config | fields, change(weights)), TARGET)


# --- rounds -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> SpecLLM:
    config = tiny_config(n_layer=3, block_size=1024)
    folder = tmp_path_factory.mktemp("target")
    weights = lively_weights(config)
    # With a final norm of ones, a layer that norms states could not distinguish those before and after it.
    weights["transformer.ln_f.weight"] = torch.rand(32, generator=torch.Generator().manual_seed(0)) + 0.1
    return SpecLLM.load(write_checkpoint(folder, config, weights=weights), drafter="none")


def layers_for(llm: SpecLLM, folder: Path, count: int, std: float = 0.15, **settings: Any) -> Mtp:
    config, weights = random_mtp(llm.placed.model.config, count, std=std)
    return load_mtp(write_folder(folder, config, weights), llm.placed.model, **settings)


def states_of_litgpt(model: GPT, tokens: Sequence[int], normed: bool) -> Tensor:
    """The last state of LitGPT's own model, in one pass without a cache, after or before the final norm: `(T, C)`."""
    reference = litgpt.model.GPT(model.config).eval()
    reference.load_state_dict(model.state_dict())
    seen: list[Tensor] = []
    reference.transformer.ln_f.register_forward_hook(
        lambda module, inputs, output: seen.append((output if normed else inputs[0])[0])
    )
    with torch.inference_mode():
        reference(torch.tensor([list(tokens)]))
    return seen[0]


@pytest.mark.parametrize(("count", "normed"), [(1, True), (1, False), (2, True), (4, True), (8, False)])
def test_after_rounds_drafts_are_those_of_a_fresh_pass_over_litgpt_s_states(llm, tmp_path, count, normed):
    """Detects wrong states and stale rows of later layers from rejected drafts."""
    from litspec.testing import _Text

    model = llm.placed.model
    layers = layers_for(llm, tmp_path, count, post_norm=normed)
    rng = random.Random(count)
    recorder = Told(layers, model, [1, 2], torch.zeros(1, 32)).recorder
    text = _Text(llm, layers, [rng.randrange(256) for _ in range(3)], 400, recorder)
    for _ in range(12):
        proposal = text.propose(rng.randint(1, 7))
        text.commit(proposal, rng.randint(0, len(proposal.tokens)), rng.randrange(256))
        recorder.logits.clear()
        drafts, logits = text.propose(7).tokens.tolist(), torch.stack(recorder.logits)
        fresh = Told(layers, model, text.tokens, states_of_litgpt(model, text.tokens, normed))
        fresh.tell(len(text.tokens))
        expected, numbers = fresh.propose(7)
        assert drafts == expected and len(drafts) == (7 if count == 1 else min(7, count))
        torch.testing.assert_close(logits, numbers, atol=2e-4, rtol=1e-4)
    wrong = Told(layers, model, text.tokens, states_of_litgpt(model, text.tokens, not normed))
    wrong.tell(len(text.tokens))
    assert (wrong.propose(1)[1] - numbers[:1]).abs().max() > 1e-3, "a case that proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 8])
def test_layers_follow_the_drafter_protocol(llm: SpecLLM, tmp_path: Path, count: int) -> None:
    check_drafter(layers_for(llm, tmp_path, count), llm, rounds=5, draws=1024 if count == 3 else 0)


def test_a_prompt_that_the_target_knows_already_is_drafted_for_as_the_first_time(llm: SpecLLM, tmp_path: Path) -> None:
    layers = layers_for(llm, tmp_path, 3)
    first, again, longer = proposals_of(llm, layers, ["a" * 600, "a" * 600, "a" * 600 + "b"])
    assert first == again and len(first) > 1
    assert proposals_of(llm, layers, ["a" * 600 + "b"]) == [longer]


def test_later_layers_that_keep_rows_of_refused_drafts_are_caught(llm: SpecLLM, tmp_path: Path) -> None:
    class Stale(Mtp):
        """Keeps the keys and values that later layers computed from drafts."""

        drafting = False

        def draft(self, *args: Any) -> Any:
            self.drafting = True
            try:
                return super().draft(*args)
            finally:
                self.drafting = False

        def _run_rows(self, layer: int, rows: Sequence[Any], *args: Any) -> list[Tensor]:
            ((session, tokens, _, start),) = rows
            marks = session.__dict__.setdefault("marks", [0, 0, 0])
            if self.drafting or layer == 0:
                marks[layer] = start + len(tokens)
                return super()._run_rows(layer, rows, *args)
            buffers = (session.pool.cache.k[layer], session.pool.cache.v[layer])
            kept = [buffer[:, :, start : marks[layer]].clone() for buffer in buffers]
            result = super()._run_rows(layer, rows, *args)
            for buffer, old in zip(buffers, kept):
                buffer[:, :, start : start + old.size(2)] = old
            return result

    layers = layers_for(llm, tmp_path, 3, std=0.6)  # so that attention matters
    layers.__class__ = Stale
    with pytest.raises(AssertionError, match="Rollback"):
        check_drafter(layers, llm, rounds=8, draws=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_texts_of_the_embedded_target_are_the_same_with_and_without_layers(tmp_path: Path, precision: str) -> None:
    plain = SpecLLM.load(precision=precision, accelerator="cpu", drafter="none")
    for count in (1, 3):
        drafted = plain.with_drafter(layers_for(plain, tmp_path / str(count), count))
        for settings in ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 50, "sampler": "coupled", "seed": 3}):
            prompts = ["It was", "Captain Wentworth had no fortune."]
            alone = plain.generate(prompts, max_new_tokens=30, **settings)
            texts = drafted.generate(prompts, max_new_tokens=30, speculative_k=3, **settings)
            assert [text.token_ids for text in texts] == [text.token_ids for text in alone]
            assert sum(text.stats.proposed for text in texts) > 0


# --- MiMo-7B ----------------------------------------------------------------------------------------------------------

# A Qwen2 backbone: biases on q, k and v alone, 32 heads of 128 over 8 groups, a rotary base of 640,000. LitGPT
# has no entry for it, so its config is written by hand. Once with narrow heads, once with those of the true size.
MIMO = dict(name="MiMo-shape", n_layer=4, attn_bias=True, rope_base=640_000, norm_eps=1e-5)
MIMO_SIZES = {"small": dict(n_head=8, n_query_groups=2), "true": dict(n_head=32, n_query_groups=8, head_size=128)}


def mimo_layer(config: Config) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and weights of a random MTP layer as MiMo-7B's checkpoint names them."""
    hf, weights = random_mtp(config, 1, rope_theta=640_000, model_type="mimo")
    start, generator = f"model.layers.{config.n_layer}.", torch.Generator().manual_seed(1)
    for x in "qkv":
        size = weights[f"{start}self_attn.{x}_proj.weight"].size(0)
        weights[f"{start}self_attn.{x}_proj.bias"] = torch.randn(size, generator=generator)
    names = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "shared_head.norm": "final_layernorm",
    }
    named = {name.replace(start, "model.layers.2."): weight for name, weight in weights.items()}
    return hf, renamed(named, names, "model.mtp_layers.")


@torch.inference_mode()
def mimo_by_transformers(
    hf: dict[str, Any], weights: dict[str, Tensor], model: GPT, tokens: list[int], states: Tensor, follow: list[int]
) -> Tensor:
    """Logits `(k, V)` of k = len(follow) drafts, by transformers' Qwen2 layer over all rows, without any cache.

    Around the layer stands what MiMo's own file says: input_proj([hidden_layernorm(h); token_layernorm(e)]).
    """
    config = Qwen2Config(
        **{name: hf[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
        num_key_value_heads=hf["num_key_value_heads"],
        rms_norm_eps=hf["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": hf["rope_theta"]},
        attn_implementation="eager",
    )
    part = {name.removeprefix("model.mtp_layers.0."): weight for name, weight in weights.items()}
    around = {
        name: part.pop(f"{name}.weight")
        for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    }
    layer = Qwen2DecoderLayer(config, 0).eval()
    layer.load_state_dict(part)  # strict: o_proj has no bias, the others have

    def normed(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.size(-1),), around[name], hf["rms_norm_eps"])

    rows, following, logits = states[: len(tokens) - 1], tokens[1:], []
    for token in follow:
        embedded = model.transformer.wte.weight[following]
        x = torch.cat((normed(rows, "hidden_layernorm"), normed(embedded, "token_layernorm")), dim=-1)
        x, positions = (x @ around["input_proj"].T)[None], torch.arange(len(following))[None]
        mask = torch.full((len(following), len(following)), -torch.inf).triu(1)[None, None]
        rope = Qwen2RotaryEmbedding(config)(x, positions)
        y = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        last = normed((y[0] if isinstance(y, tuple) else y)[0, -1:], "final_layernorm")
        logits.append(last @ model.lm_head.weight.T)
        rows, following = torch.cat((rows, last)), [*following, token]
    return torch.cat(logits)


@pytest.mark.slow
@pytest.mark.parametrize("size", MIMO_SIZES)
def test_drafts_for_mimo_s_shape_are_those_of_transformers_qwen2_layer_after_rounds(tmp_path, size):
    from litspec.testing import _Text

    config = tiny_config(**MIMO, **MIMO_SIZES[size])
    target = write_checkpoint(tmp_path / "target", config, weights=lively_weights(config))
    llm = SpecLLM.load(target, drafter="none")
    model = llm.placed.model
    hf, weights = mimo_layer(config)
    layers = load_mtp(write_folder(tmp_path / "layers", hf, weights), model)
    block = layers.layers.config
    assert layers.hidden_first and block.rope_base == 640_000 and (block.attn_bias, block.bias) == (True, False)
    assert (block.n_head, block.n_query_groups) == (config.n_head, config.n_query_groups)
    assert block.head_size == (128 if size == "true" else 4)

    rng = random.Random(0)
    recorder = Told(layers, model, [1, 2], torch.zeros(1, 32)).recorder
    text = _Text(llm, layers, [rng.randrange(256) for _ in range(3)], 200, recorder)
    for _ in range(6):
        proposal = text.propose(rng.randint(1, 7))
        text.commit(proposal, rng.randint(0, len(proposal.tokens)), rng.randrange(256))
        recorder.logits.clear()
        drafts, logits = text.propose(5).tokens.tolist(), torch.stack(recorder.logits)
        states = states_of_litgpt(model, text.tokens, normed=True)
        expected = mimo_by_transformers(hf, weights, model, text.tokens, states, drafts)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
        assert drafts == expected.argmax(-1).tolist()
    layers.hidden_first = False
    swapped = Told(layers, model, text.tokens, states)
    swapped.tell(len(text.tokens))
    assert (swapped.propose(1)[1] - expected[:1]).abs().max() > 1e-2, "a case that proves nothing"
    layers.hidden_first = True

    check_drafter(layers, llm, rounds=3, draws=0)
    out = llm.with_drafter(layers).generate("abc", max_new_tokens=20, temperature=0.0, speculative_k=4)
    assert out.token_ids == llm.generate("abc", max_new_tokens=20, temperature=0.0).token_ids
    assert out.stats.proposed > 0
