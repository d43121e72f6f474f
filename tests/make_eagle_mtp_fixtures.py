"""Records what the reference implementations of EAGLE-3 and MTP layers draft, on tiny random weights.

None of them can be installed with LitGPT, so each is recorded once in a separate environment; tests read the files:

    python tests/make_eagle_mtp_fixtures.py eagle REPO    # torch 2.13, transformers 5.24; REPO: EAGLE's, at cb7e084
    TORCHDYNAMO_DISABLE=1 python tests/make_eagle_mtp_fixtures.py speculators    # transformers 5.19, speculators 0.9.0
    python tests/make_eagle_mtp_fixtures.py mtp           # torch 2.13, transformers 5.24

A file holds weights by the reference's names, the tokens of one text, the target's states at their positions, and for
each round how many tokens were known, what was drafted and with which logits. How a round ends is scripted: `ACCEPTED`
of its drafts are taken, then a token that was not drafted follows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FIXTURES = Path(__file__).parent / "fixtures"
VOCAB, CHANNELS, MIDDLE, HEADS, GROUPS = 97, 16, 24, 2, 1
DRAFT_VOCAB = 48
PROMPT = 11
ACCEPTED = (2, 0, 4, 1, 3, 0)
STD = 0.15  # at 0.02 all logits are nearly equal


def randomize(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=STD)
        else:
            # Norms that are all 1 would hide one that is left out.
            nn.init.uniform_(parameter, 0.5, 1.5)


def play(draft: Callable[[Tensor], tuple[Tensor, Tensor]], accepted: tuple[int, ...], prompt: int) -> dict[str, Tensor]:
    """Plays scripted rounds.

    Args:
        draft: Given the known tokens `(n + 1,)`, returns drafts `(k,)` and their logits `(k, V)`.
        accepted: How many drafts each round takes.
        prompt: Tokens of the prompt.
    """
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (prompt + 1,), generator=generator)
    known, drafts, logits = [], [], []
    for take in (*accepted, 0):
        drafted, numbers = draft(tokens)
        gaps = numbers.topk(2).values
        assert (gaps[:, 0] - gaps[:, 1]).min() > 1e-4, "a near tie; take another seed"
        known.append(len(tokens))
        drafts.append(drafted)
        logits.append(numbers)
        take = min(take, len(drafted))
        own = torch.randint(VOCAB, (1,), generator=generator)
        if take < len(drafted) and own == drafted[take]:
            own = (own + 1) % VOCAB
        tokens = torch.cat((tokens, drafted[:take], own))
    return {
        "tokens": tokens[: known[-1]],
        "known": torch.tensor(known),
        "drafts": torch.stack(drafts),
        "logits": torch.stack(logits),
    }


def save(name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    FIXTURES.mkdir(exist_ok=True)
    path = FIXTURES / f"{name}.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, {"config": json.dumps(config)})
    print(path, path.stat().st_size, "bytes")


def target_ids() -> Tensor:
    """The target's id of each id of the reduced vocabulary."""
    return torch.arange(DRAFT_VOCAB) * 2 + (torch.arange(DRAFT_VOCAB) > 20).long()


@torch.no_grad()
def eagle(repo: str) -> None:
    sys.path.insert(0, repo)
    from eagle.model.cnets import Model
    from eagle.model.configs import EConfig

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": CHANNELS,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    config = EConfig(pad_token_id=0, **fields)
    config.rope_scaling = None
    model = Model(config, load_emb=False, total_tokens=5, depth=3, top_k=1).eval()
    randomize(model, 0)
    model.d2t = target_ids() - torch.arange(DRAFT_VOCAB)
    model.init_tree()
    model.reset_kv()
    states = torch.randn(64, 3 * CHANNELS, generator=torch.Generator().manual_seed(3))
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.reshape(1, -1)))
    rows = 0

    def draft(tokens: Tensor) -> tuple[Tensor, Tensor]:
        # As in EAGLE's own loop: after a round the states of its new positions only, to keys and values that it keeps.
        nonlocal rows
        logits.clear()
        found, *_ = model.topK_genrate(states[None, rows : len(tokens) - 1], tokens[None], None, None)
        rows = len(tokens) - 1
        assert model.stable_kv[0][0].shape[2] == rows
        return found[0, 1:], torch.cat(logits)[: found.size(1) - 1]

    played = play(draft, ACCEPTED, PROMPT)
    weights = {f"weights.{name}": value for name, value in model.state_dict().items() if name != "t2d"}
    save("eagle3", weights | played | {"states": states[: len(played["tokens"]) - 1]}, fields | {"hidden_act": "silu"})


SPECULATORS = {
    "plain": {},
    "before_residual": {"norm_before_residual": True},
    "output": {"norm_output": True, "fc_norm": True},
    "before_fc": {"norm_before_fc": True, "norm_before_residual": True},
}


@torch.no_grad()
def speculators() -> None:
    """The same weights as EAGLE's; later steps are given the text's own tokens instead of the drafts."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    with safe_open(FIXTURES / "eagle3.safetensors", framework="pt") as content:
        names = content.keys()
        recorded = {name: content.get_tensor(name) for name in names}
        fields = json.loads(content.metadata()["config"])
    weights = {name.removeprefix("weights."): w for name, w in recorded.items() if name.startswith("weights.")}
    weights = {name.replace("midlayer.", "layers.0."): w for name, w in weights.items()}
    generator = torch.Generator().manual_seed(5)
    extra = {f"fc_norm.{i}.weight": 0.5 + torch.rand(CHANNELS, generator=generator) for i in range(3)}
    extra["input_norm.weight"] = 0.5 + torch.rand(3 * CHANNELS, generator=generator)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[target_ids()] = True

    tensors: dict[str, Tensor] = {f"weights.{name}": weight for name, weight in extra.items()}
    rows = [0, 9, 20]
    tensors["rows"] = torch.tensor(rows)
    for name, flags in SPECULATORS.items():
        layer = LlamaConfig(**{key: value for key, value in fields.items() if key != "draft_vocab_size"})
        layer._attn_implementation = "eager"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=DRAFT_VOCAB,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
            **flags,
        )
        model = Eagle3DraftModel(config).eval()
        model.load_state_dict(weights | extra | {"t2d": t2d}, strict=False)
        for wanted in model.state_dict():
            assert wanted in {**weights, **extra, "t2d": 0} or "verifier" in wanted, wanted
        logits: list[Tensor] = []
        model.lm_head.register_forward_hook(lambda module, inputs, output, to=logits: to.append(output[0]))
        tokens, states = recorded["tokens"], recorded["states"]
        model(states[None], tokens[None, 1:], torch.zeros(1, len(states), dtype=torch.long), ttt_steps=3)
        tensors[name] = torch.stack(logits)[:, rows].transpose(0, 1)
    save("eagle3_speculators", tensors, SPECULATORS)


@torch.no_grad()
def mtp() -> None:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    count, n_layer = 3, 2
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": CHANNELS,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": n_layer,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "attention_bias": True,
        "use_qk_norm": True,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }
    fields |= experts
    config = Glm4MoeConfig(first_k_dense_replace=10, num_mtp_layers=count, **fields)
    target = Glm4MoeForCausalLM(config).eval()
    model = MtpModel(target, count).eval()
    randomize(target, 0)
    randomize(model.layers, 1)
    for layer in model.layers:
        layer.mtp_block.mlp.gate.e_score_correction_bias.normal_(std=0.1)

    def inputs(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = target(tokens[None, :-1], output_hidden_states=True).hidden_states[-1]
        return tokens[None, 1:], states, torch.arange(1, len(tokens))[None]

    def by_layers(tokens: Tensor) -> tuple[Tensor, Tensor]:
        ids, states, positions = inputs(tokens)
        cache = MtpCache(config=config.get_mtp_config())
        drafts, logits, _ = model(ids, states, None, positions, cache)
        return drafts[0], logits[0]

    def by_one_layer(tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Repeatedly uses its own output as state, each time in a whole pass without keys and values."""
        ids, states, _ = inputs(tokens)
        drafts, logits = [], []
        for _ in range(4):
            positions = torch.arange(1, ids.size(1) + 1)[None]
            cache = MtpCache(config=config.get_mtp_config())
            states = torch.cat((states, model.forward_layer(0, states, positions, cache, input_ids=ids)[:, -1:]), 1)
            logits.append(model._project_to_logits(states[:, -1]))
            drafts.append(logits[-1].argmax(-1))
            ids = torch.cat((ids, drafts[-1][None]), 1)
        return torch.cat(drafts), torch.cat(logits)

    weights = {"embed": target.get_input_embeddings().weight, "head": target.lm_head.weight}
    # By the names that such layers have in a checkpoint, where they follow the target's own.
    for name, value in model.layers.state_dict().items():
        layer, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        start = f"weights.model.layers.{n_layer + int(layer)}."
        if rest == "mlp.experts.gate_up_proj":
            for i, expert in enumerate(value):
                for part, half in zip(("gate_proj", "up_proj"), expert.chunk(2)):
                    weights[f"{start}mlp.experts.{i}.{part}.weight"] = half
        elif rest == "mlp.experts.down_proj":
            for i, expert in enumerate(value):
                weights[f"{start}mlp.experts.{i}.down_proj.weight"] = expert
        else:
            weights[start + rest] = value
    tensors: dict[str, Tensor] = {}
    for kind, draft, prompt in (
        ("layers", by_layers, PROMPT),
        ("short", by_layers, 1),
        ("chain", by_one_layer, PROMPT),
    ):
        played = play(draft, tuple(min(a, 3) for a in ACCEPTED), prompt)
        played["states"] = inputs(played["tokens"])[1][0]
        tensors |= {f"{kind}.{name}": value for name, value in played.items()}
    more = {"rms_norm_eps": config.rms_norm_eps, "hidden_act": config.hidden_act, "model_type": config.model_type}
    more |= {"rope_parameters": config.rope_parameters, "num_nextn_predict_layers": count}
    save("mtp", weights | tensors, fields | more)


if __name__ == "__main__":
    {"eagle": eagle, "speculators": speculators, "mtp": mtp}[sys.argv[1]](*sys.argv[2:])
