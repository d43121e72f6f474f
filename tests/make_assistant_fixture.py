"""Records what transformers' `Gemma4AssistantForCausalLM` drafts from given keys, values and states, for tests.

Run with transformers 5.24 (which does not fit beside litgpt): `python tests/make_assistant_fixture.py`. The keys and
values are random: the assistant takes whatever it is lent. They are cut to n, as transformers' own generation does not.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

VOCAB, CHANNELS, HEAD_SIZE, GROUPS, WINDOW, LENGTH, STEPS = 96, 24, 8, 2, 8, 40, 4
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
# Tokens known in each round: within the window, at its edge, behind it, far behind it.
KNOWN = [2, 5, 8, 9, 10, 11, 16, 29, 33, 40]


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    text = Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_SIZE,
        global_head_dim=HEAD_SIZE,
        max_position_embeddings=512,
        sliding_window=WINDOW,
        layer_types=KINDS,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=3,
    )
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=CHANNELS)
    model = Gemma4AssistantForCausalLM(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    embed, states = 0.3 * torch.randn(VOCAB, CHANNELS), torch.randn(LENGTH, CHANNELS)
    tokens = torch.randint(0, VOCAB, (LENGTH,))
    lent = {kind: torch.randn(2, 1, GROUPS, LENGTH, HEAD_SIZE) for kind in set(KINDS)}
    drafts, logits = [], []
    for known in KNOWN:
        n = known - 1  # tokens that the target has run
        shared = {kind: (kv[0][:, :, :n], kv[1][:, :, :n]) for kind, kv in lent.items()}
        token, state = tokens[n].view(1, 1), states[n - 1].view(1, 1, -1)
        drafts.append([])
        for _ in range(STEPS):
            out = model(
                inputs_embeds=torch.cat((embed[token] * CHANNELS**0.5, state), dim=-1),
                attention_mask=torch.ones(1, n, dtype=torch.long),
                position_ids=torch.tensor([[n]]),
                shared_kv_states=shared,
            )
            token, state = out.logits.argmax(-1), out.last_hidden_state
            logits.append(out.logits[0, 0])
            drafts[-1].append(token.item())
    found = {f"weights.{name}": w for name, w in model.state_dict().items() if name != "lm_head.weight"}
    found |= {"embed": embed, "states": states, "tokens": tokens, "known": torch.tensor(KNOWN)}
    found |= {f"lent.{kind}": kv for kind, kv in lent.items()}
    found |= {"drafts": torch.tensor(drafts), "logits": torch.stack(logits).view(len(KNOWN), STEPS, VOCAB)}
    folder = Path(__file__).parent / "fixtures"
    written = json.dumps(json.loads(config.to_json_string(use_diff=False)))
    save_file(
        {n: t.clone().contiguous() for n, t in found.items()}, folder / "assistant.safetensors", {"config": written}
    )


if __name__ == "__main__":
    main()
