"""Tiny EAGLE-3 and MTP folders, and texts told to a drafter that reads the target's states, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from litgpt.config import Config
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from litspec import SpecLLM
from litspec.drafters import Drafter
from litspec.drafters.dflash_folder import read_config
from litspec.model import GPT
from litspec.model.dflash import DFlashNetwork
from litspec.sampling import Greedy, Inputs, Sampling

FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a recorded reference, and its config."""
    with safe_open(FIXTURES / f"{name}.safetensors", framework="pt") as content:
        names = content.keys()
        return {name: content.get_tensor(name) for name in names}, json.loads(content.metadata()["config"])


def write_folder(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], *, pickled: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    weights = {name: weight.clone().contiguous() for name, weight in weights.items()}
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def bare_target(
    embedding: Tensor, head: Tensor | None = None, *, n_layer: int = 8, vocab_size: int | None = None, seed: int = 0
) -> GPT:
    """A random target with a given embedding and head."""
    padded, n_embd = embedding.shape
    config = Config(
        name="bare-target",
        block_size=2048,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=2,
        n_query_groups=1,
        vocab_size=vocab_size or padded,
        padded_vocab_size=padded,
        intermediate_size=24,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    model = GPT(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: 0.3 * torch.randn(weight.shape, generator=generator) if weight.dim() > 1 else weight
        for name, weight in model.state_dict().items()
    }
    state["transformer.wte.weight"] = embedding
    state["lm_head.weight"] = embedding if head is None else head
    model.load_state_dict(state)
    return model


class Recorder(Greedy):
    """Stores the logits it receives; the choice can be given."""

    def __init__(self) -> None:
        super().__init__(Sampling(temperature=0))
        self.logits: list[Tensor] = []
        self.follow: Sequence[int] = ()

    def draw(self, logits: Tensor, position: int | Inputs) -> tuple[Tensor, None]:
        told = self.follow[len(self.logits) : len(self.logits) + 1]
        self.logits += logits.clone()  # a row each
        return torch.tensor(told) if told else logits.max(-1).indices, None


class Told:
    """One text with given tokens and states, which are committed to a session as in rounds.

    Args:
        tokens: All of them.
        states: `(T, taps * C)`, row p the target's at position p.
    """

    def __init__(self, drafter: Drafter, model: GPT, tokens: Sequence[int], states: Tensor, length: int = 1024) -> None:
        self.tokens = list(tokens)
        self._states = torch.cat((torch.zeros_like(states[:1]), states))
        self.recorder = Recorder()
        target = SimpleNamespace(
            model=model, config=model.config, device=torch.device("cpu"), stop_ids=(), number=0, shared={}
        )
        target.max_length, target.whole = length, SimpleNamespace(shape=(1, length))
        self.session = drafter.start(target, length, self.recorder)
        self.known = 0

    def tell(self, known: int, chunk: int | None = None) -> None:
        """Commits the first `known` tokens, in chunks."""
        while self.known < known:
            end = min(known, self.known + (chunk or known))
            states = self._states[self.known : end].clone()
            self.session.commit(self.tokens[self.known : end], self.known, states)
            states.fill_(float("nan"))  # the engine may overwrite these states later
            self.known = end

    def propose(self, k: int) -> tuple[list[int], Tensor]:
        """The drafts, and their logits `(k, V)`."""
        self.recorder.logits.clear()
        proposal = self.session.propose(self.tokens[self.known - 1], self.known - 1, k)
        return proposal.tokens.tolist(), torch.stack(self.recorder.logits)


def proposals_of(llm: SpecLLM, drafter: Drafter, prompts: Sequence[str]) -> list[list[list[int]]]:
    """The proposals of a drafter in the rounds of consecutive greedy texts with the same loaded target."""
    drafted = llm.with_drafter(drafter)
    kind, found = type(drafter), []

    class Watched(kind):
        def propose_batch(self, *args: Any) -> Any:
            proposals = super().propose_batch(*args)
            found[-1].append(proposals[0].tokens.tolist())
            return proposals

    drafter.__class__ = Watched
    for prompt in prompts:
        found.append([])
        drafted.generate(prompt, max_new_tokens=12, temperature=0.0, speculative_k=min(5, llm.verify_width - 1))
    drafter.__class__ = kind
    return found


def random_eagle(
    config: Config, *, draft_vocab_size: int | None = None, seed: int = 0, std: float = 0.15, **fields: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and weights of a random EAGLE-3 head for a target, by SafeAILab's names."""
    C, D, H, G, V = config.n_embd, config.head_size, config.n_head, config.n_query_groups, config.padded_vocab_size
    size = draft_vocab_size or V
    hf = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": C,
        "intermediate_size": 2 * C,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": D,
        "vocab_size": V,
        "draft_vocab_size": size,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    } | fields
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc": (C, 3 * C),
        "lm_head": (size, C),
        "midlayer.self_attn.q_proj": (H * D, 2 * C),
        "midlayer.self_attn.k_proj": (G * D, 2 * C),
        "midlayer.self_attn.v_proj": (G * D, 2 * C),
        "midlayer.self_attn.o_proj": (C, H * D),
        "midlayer.mlp.gate_proj": (2 * C, C),
        "midlayer.mlp.up_proj": (2 * C, C),
        "midlayer.mlp.down_proj": (C, 2 * C),
    }
    weights = {f"{name}.weight": std * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        weights[f"{name}.weight"] = 0.5 + torch.rand(C, generator=generator)
    if draft_vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[:size].sort().values
        weights["d2t"] = ids - torch.arange(size)
    return hf, weights


def random_mtp(
    config: Config, count: int, *, seed: int = 0, std: float = 0.15, **fields: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and weights of random dense MTP layers for a target, by DeepSeek's names."""
    C, D, H, G = config.n_embd, config.head_size, config.n_head, config.n_query_groups
    hf = {
        "hidden_size": C,
        "intermediate_size": 2 * C,
        "num_hidden_layers": config.n_layer,
        "num_nextn_predict_layers": count,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": D,
        "vocab_size": config.padded_vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    } | fields
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for i in range(count):
        start = f"model.layers.{config.n_layer + i}."
        shapes = {
            "eh_proj": (C, 2 * C),
            "self_attn.q_proj": (H * D, C),
            "self_attn.k_proj": (G * D, C),
            "self_attn.v_proj": (G * D, C),
            "self_attn.o_proj": (C, H * D),
            "mlp.gate_proj": (2 * C, C),
            "mlp.up_proj": (2 * C, C),
            "mlp.down_proj": (C, 2 * C),
        }
        weights |= {
            f"{start}{name}.weight": std * torch.randn(shape, generator=generator) for name, shape in shapes.items()
        }
        for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"):
            weights[f"{start}{name}.weight"] = 0.5 + torch.rand(C, generator=generator)
    return hf, weights


def random_dflash(config: Config, folder: Path, *, seed: int = 0, std: float = 0.15) -> Path:
    """A folder with a random DFlash drafter of one layer for a target, as z-lab publishes them."""
    raw = json.loads((FIXTURES / "dflash" / "v1" / "config.json").read_text())
    raw |= dict(hidden_size=config.n_embd, vocab_size=config.padded_vocab_size, num_target_layers=config.n_layer)
    raw |= dict(num_hidden_layers=1, layer_types=None)
    raw["dflash_config"] |= dict(target_layer_ids=[0, config.n_layer - 1], mask_token_id=260)
    network = DFlashNetwork(read_config(raw, "The drafter", config.n_layer))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: std * torch.randn(weight.shape, generator=generator) if weight.dim() > 1 else weight
        for name, weight in network.state_dict().items()
    }
    return write_folder(folder, raw, weights)
