"""Records what z-lab's `dflash` 0.1.0 computes on tiny random weights, for `test_dflash.py`.

It needs a separate environment, since no version of transformers fits both it and LitGPT:

    python -m venv dflash-env
    dflash-env/bin/pip install torch==2.13.0 dflash==0.1.0 "transformers>=5.19,<5.25"
    dflash-env/bin/python tests/make_dflash_fixtures.py tests/fixtures/dflash

Each drafter's folder is what `save_pretrained` writes. Beside it stands its `.reference.safetensors`: the committed
text, and for each scripted round the anchor's position, how much of the proposal was accepted, and the logits of the
whole block. Weights have a standard deviation of 0.15: at 0.02 all logits are nearly equal and would hide a fault.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache, extract_context_feature
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 48
BLOCK = 6
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=512,
    torch_dtype="float32",
)
PROMPT_SIZE = 21  # longer than the window
WINDOW = 8
# How much of each proposal is accepted: nothing, everything, and between.
ACCEPTED = [0, 5, 2, 1, 0, 4, 5, 5, 3, 0]


def randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(0.15 * noise if p.dim() > 1 else 1 + 0.15 * noise)
            if name.startswith("candidate_selector"):
                p.mul_(4)  # else its effect is too small to matter
    model.eval()


# Each drafter's version, and which of its layers have a window: causal ones in version 1, and in version 2, which also
# has all the scales, one that looks both ways.
DRAFTERS = {"v1": (1, (True, False, True)), "v2": (2, (False, True)), "windows": (1, (True, True))}


def drafter(version: int, windows: tuple[bool, ...]) -> DFlashDraftModel:
    config = Qwen3Config(
        **SIZES,
        num_hidden_layers=len(windows),
        layer_types=["sliding_attention" if window else "full_attention" for window in windows],
        use_sliding_window=True,
        sliding_window=WINDOW,
        rope_theta=1e6,
    )
    config.num_target_layers = 4
    config.block_size = BLOCK
    config.dflash_config = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1, 2] if version == 1 else [0, 3]}
    if version == 2:
        config.is_causal = False
        config.dflash_config |= {
            "conv_kernel_size": 3,
            "conv_group_size": 4,
            "selector_rank": 4,
            "selector_top_k": 8,
            "input_embedding_scale": 2.0,
            "output_multiplier": 1.5,
            "final_logit_softcapping": 3.0,
        }
    model = (DFlashDraftModel if version == 1 else DFlash2DraftModel)(config)
    model.config.architectures = [type(model).__name__]
    randomize(model, 10 + version)
    return model


@torch.no_grad()
def record(model: DFlashDraftModel, target: Qwen3ForCausalLM, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    text = torch.randint(0, VOCAB - 1, (1, PROMPT_SIZE + 1), generator=generator)
    cache = _make_cache(model.config)
    seen = 0
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ("anchor", "logits", "path", "candidates", "q")}
    scale = model.config.dflash_config.get("input_embedding_scale", 1.0)
    for accepted in ACCEPTED:
        n = text.size(1) - 1
        states = target(text[:, :n], output_hidden_states=True).hidden_states
        context = extract_context_feature(states, model.target_layer_ids)
        ids = torch.full((1, BLOCK), model.mask_token_id)
        ids[0, 0] = text[0, n]
        x = target.get_input_embeddings()(ids) * scale
        positions = torch.arange(n + BLOCK).unsqueeze(0)
        rows = model(
            target_hidden=context[:, seen:],
            noise_embedding=x,
            position_ids=positions[:, seen:],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, n)
        fresh = model(target_hidden=context, noise_embedding=x, position_ids=positions)
        assert (rows - fresh).abs().max() < 1e-5, (accepted, (rows - fresh).abs().max())
        logits = model.compute_logits(rows, target.lm_head)
        found["anchor"].append(torch.tensor(n))
        found["logits"].append(logits[0])
        if version == 2:
            torch.manual_seed(n)
            path, candidates, q = model.propose(rows[:, 1:], ids[:, 0], target.lm_head, 1.0)
            found["path"].append(path[0])
            found["candidates"].append(candidates[0])
            found["q"].append(q[0])
            drafts, _, _ = model.propose(rows[:, 1:], ids[:, 0], target.lm_head, 0.0)
        else:
            drafts = logits[:, 1:].argmax(-1)
        own = torch.randint(0, VOCAB - 1, (1, 1), generator=generator)
        text = torch.cat((text, drafts[:, :accepted], own), 1)
        seen = n
    stacked = {name: torch.stack(values) for name, values in found.items() if values}
    return stacked | {"text": text[0], "accepted": torch.tensor(ACCEPTED)}


def main(folder: Path) -> None:
    """Writes the target, and a folder and a file for each drafter."""
    target = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=4, tie_word_embeddings=False))
    randomize(target, 0)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in target.state_dict().items()}, folder / "target.safetensors")
    for name, (version, windows) in DRAFTERS.items():
        model = drafter(version, windows)
        out = folder / name
        model.save_pretrained(out)
        reference = record(model, target, version)
        save_file({key: t.contiguous() for key, t in reference.items()}, folder / f"{name}.reference.safetensors")
        config = json.loads((out / "config.json").read_text())
        config.pop("transformers_version", None)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
