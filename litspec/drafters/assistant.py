"""The single-position assistant (Gemma 4): a small model without keys and values; it attends to the target's.

With n tokens run by the target, f its state after the final norm, and t_n the last committed token, as in transformers'
`Gemma4AssistantForCausalLM`:

    z = f_(n-1);  x = t_n;  k times:
        s = layers(W_pre [e_x; z])      d = argmax head(s)      z = W_post s;  x = d

All k steps are at position n. A layer attends to the keys and values of the target's last layer of the same kind (full
or sliding attention), at positions before n. Later positions may hold rows of rejected proposals. So each proposal uses
a new view of the target's cache that ends at n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from litspec.drafters.base import Cost, Drafter, DraftSession, Proposal
from litspec.drafters.folders import open_published
from litspec.drafters.hf_layers import nested, number, take
from litspec.drafters.tapped import MAX_K, embedding_of, linear, norm, proposals, stacked
from litspec.errors import InputError
from litspec.model import GPT
from litspec.model.attention import CausalSelfAttention, rotate
from litspec.sampling import Distribution, Inputs, Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession

Rows = Callable[[Tensor], Tensor]
FULL, SLIDING = "full_attention", "sliding_attention"


class Layer(NamedTuple):
    """One layer, as functions of a row `(1, D)`.

    Attributes:
        source: The target's layer whose keys and values it reads.
        window: Length of the sliding window; None for full attention.
        frequencies: (head size / 2,) angles per position, float32.
        scalar: Factor of the layer's output, (1,).
    """

    source: int
    window: int | None
    frequencies: Tensor
    scalar: Tensor
    norm_attention: Rows
    query: Rows
    norm_query: Rows
    project: Rows
    norm_attended: Rows
    norm_mlp: Rows
    gate: Rows
    up: Rows
    down: Rows
    norm_output: Rows


class Assistant(Drafter):
    """Drafts with a single-position assistant, see `drafters.Drafter`. Made by `load_assistant`.

    Args:
        layers: Its layers.
        before, norm, after: The projection of embedding and state, the final norm, the projection back to a state.
        head: Maps a normed row to logits `(1, V)` over the target's padded vocabulary.
        step_bytes: Bytes of weights read per token.
    """

    taps = (-1,)
    max_k = MAX_K

    def __init__(
        self, layers: Sequence[Layer], before: Rows, norm: Rows, after: Rows, head: Rows, step_bytes: int
    ) -> None:
        self.layers = tuple(layers)
        self.before, self.norm, self.after, self.head = before, norm, after, head
        self._step_bytes = step_bytes

    @property
    def name(self) -> str:
        return "assistant"

    def cost(self, k: int) -> Cost:
        return Cost(k * self._step_bytes, k * len(self.layers))

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> AssistantSession:
        return AssistantSession(self, target, sampler)


class AssistantSession(DraftSession):
    """One text, see `drafters.DraftSession`. It stores only the last committed state."""

    def __init__(self, drafter: Assistant, target: TargetSession, sampler: Sampler) -> None:
        self._drafter = drafter
        self._target = target
        self._sampler = sampler
        self._state: Tensor | None = None  # (1, C), the target's at the position before the last committed token

    @torch.inference_mode()
    def commit(self, tokens: Sequence[int], input_pos: int, hidden: Tensor | None = None) -> None:
        if hidden is None:
            raise ValueError("commit needs the target's states for a drafter with taps")
        if len(tokens):
            # A copy: the tensor may be overwritten.
            self._state = hidden[len(tokens) - 1 : len(tokens)].clone()

    @torch.inference_mode()
    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        device = self._target.device
        k = min(k, self._drafter.max_k)
        if k < 1 or input_pos < 1 or self._state is None:
            return Proposal(torch.empty(0, dtype=torch.int64, device=device))
        borrowed = [self._borrow(layer, input_pos) for layer in self._drafter.layers]
        inputs = Inputs.stacked([self._sampler.inputs(device, input_pos + 1, k)])
        last, state = torch.tensor([token], device=device), self._state
        drawn: list[tuple[Tensor, Distribution | None]] = []
        for i in range(k):
            logits, state = self._step(last, state, borrowed)
            drawn.append(self._sampler.draw(logits, inputs.row(i, [each for each, _ in drawn])))
            last = drawn[-1][0]
        return proposals(stacked(drawn), [k])[0]

    def _borrow(self, layer: Layer, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The keys and values that a layer attends to, `(1, G, L, D)`, and cosines and sines `(1, 1, D)` of `end`.

        As in transformers' mask, a window holds the key at `end - 1` and `window` keys before it.
        """
        start = 0 if layer.window is None else max(0, end - layer.window - 1)
        # The target's layers may be on several devices; the assistant's weights are on that of its embedding.
        cache, device = self._target.cache, layer.frequencies.device
        k, v = (buffers[layer.source][:, :, start:end].to(device) for buffers in (cache.k, cache.v))
        angles = (layer.frequencies * end).view(1, 1, -1)
        cos, sin = angles.cos(), angles.sin()
        return k, v, torch.cat((cos, cos), dim=-1).to(k.dtype), torch.cat((-sin, sin), dim=-1).to(k.dtype)

    def _step(
        self, token: Tensor, state: Tensor, borrowed: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Logits `(1, V)` after a token `(1,)`, and the state `(1, C)` for the next step."""
        drafter, model = self._drafter, self._target.model
        embedded = embedding_of(model)(token)
        if model.config.scale_embeddings:
            embedded = embedded * torch.tensor(model.config.n_embd**0.5, dtype=embedded.dtype)
        x = drafter.before(torch.cat((embedded, state), dim=-1))
        for layer, (k, v, cos, sin) in zip(drafter.layers, borrowed, strict=True):
            groups, size = k.size(1), k.size(3)
            q = layer.norm_query(layer.query(layer.norm_attention(x)).view(1, -1, size))
            q = rotate(q, cos, sin).view(1, groups, -1, size)
            y = F.scaled_dot_product_attention(q, k, v, scale=1.0)
            x = x + layer.norm_attended(layer.project(y.reshape(1, -1)))
            y = layer.norm_mlp(x)
            y = layer.down(F.gelu(layer.gate(y), approximate="tanh") * layer.up(y))
            x = (x + layer.norm_output(y)) * layer.scalar
        x = drafter.norm(x)
        return drafter.head(x), drafter.after(x)


# --- Loading ----------------------------------------------------------------------------------------------------------


def load_assistant(folder: str | Path, target_model: GPT) -> Assistant:
    """Reads a published assistant, `Gemma4AssistantForCausalLM`.

    Args:
        folder: A folder with `config.json` and weights.
        target_model: The target; the assistant is put on its device, in its precision.

    Raises:
        InputError: The assistant was made for another target or is of an unsupported kind, or the target's keys and
            values cannot be shared.
    """
    folder = Path(folder)
    published = open_published(folder)
    config = published.config
    text = nested(config, "text_config", folder)
    _check(config, text, target_model, folder)
    target, like = target_model.config, embedding_of(target_model).weight
    weights = published.read()
    size = 0

    def get(name: str, *shape: int) -> Tensor:
        nonlocal size
        weight = take(weights, name, folder)
        if tuple(weight.shape) != shape:
            raise InputError(
                f"A weight in {str(folder)!r} does not fit its config.json: {name!r} has shape {tuple(weight.shape)}, "
                f"but the config requires {shape}."
            )
        size += weight.numel() * like.element_size()
        return weight

    width, eps = number(text, "hidden_size", folder), text.get("rms_norm_eps", 1e-6)
    inner, heads = number(text, "intermediate_size", folder), number(text, "num_attention_heads", folder)
    sources = _sources(target_model)
    layers = []
    for i, kind in enumerate(text["layer_types"]):
        start, head_size = f"model.layers.{i}.", target_model.transformer.h[sources[kind]].attn.head_size

        def matrix(name: str, out: int, in_: int, start: str = start) -> Rows:
            return linear(get(f"{start}{name}.weight", out, in_), like)

        def normed(name: str, size: int = width, start: str = start) -> Rows:
            return norm(get(f"{start}{name}.weight", size), eps, like)

        layers.append(
            Layer(
                source=sources[kind],
                window=target.sliding_window_size if kind == SLIDING else None,
                frequencies=_frequencies(text, kind, head_size, folder).to(like.device),
                scalar=get(f"{start}layer_scalar", 1).to(like.device, like.dtype),
                norm_attention=normed("input_layernorm"),
                query=matrix("self_attn.q_proj", heads * head_size, width),
                norm_query=normed("self_attn.q_norm", head_size),
                project=matrix("self_attn.o_proj", width, heads * head_size),
                norm_attended=normed("post_attention_layernorm"),
                norm_mlp=normed("pre_feedforward_layernorm"),
                gate=matrix("mlp.gate_proj", inner, width),
                up=matrix("mlp.up_proj", inner, width),
                down=matrix("mlp.down_proj", width, inner),
                norm_output=normed("post_feedforward_layernorm"),
            )
        )
    before = linear(get("pre_projection.weight", width, 2 * target.n_embd), like)
    after = linear(get("post_projection.weight", target.n_embd, width), like)
    last = norm(get("model.norm.weight", width), eps, like)
    vocab_size = number(text, "vocab_size", folder)
    output = linear(get("model.embed_tokens.weight", vocab_size, width), like)
    missing = target.padded_vocab_size - vocab_size

    def head(x: Tensor) -> Tensor:
        return F.pad(output(x), (0, missing), value=-torch.inf) if missing else output(x)

    if rest := sorted(weights.keys() - {"lm_head.weight"}):
        raise InputError(f"The assistant in {str(folder)!r} has an unknown weight {rest[0]!r}.")
    return Assistant(layers, before, last, after, head, size)


def _sources(target_model: GPT) -> dict[str, int]:
    """The target's last layer of each kind of attention."""
    kinds = (FULL if block.attn.window is None else SLIDING for block in target_model.transformer.h)
    return {kind: i for i, kind in enumerate(kinds)}


def _frequencies(text: Mapping[str, Any], kind: str, head_size: int, folder: Path) -> Tensor:
    """Angles per position, `(head size / 2,)`. With type "proportional" only the first part of a head is rotated."""
    rope = nested(nested(text, "rope_parameters", folder), kind, folder)
    name = rope.get("rope_type")
    if name not in ("default", "proportional") or "rope_theta" not in rope:
        raise InputError(
            f"config.json in {str(folder)!r} must give rope_parameters for {kind} with a rope_theta and a rope_type "
            f"'default' or 'proportional', got {rope!r}."
        )
    share = rope.get("partial_rotary_factor", 1.0) if name == "proportional" else 1.0
    rotated = int(share * head_size // 2)
    exponents = torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / rope["rope_theta"] ** exponents / (rope.get("factor", 1.0) if name == "proportional" else 1.0)
    return F.pad(frequencies, (0, head_size // 2 - rotated))


def _check(config: Mapping[str, Any], text: Mapping[str, Any], target_model: GPT, folder: Path) -> None:
    """Raises an `InputError` if the assistant is not supported or does not fit the target."""
    target = target_model.config
    where = f"The assistant in {str(folder)!r}"
    if config.get("use_ordered_embeddings"):
        raise InputError(
            f"{where} has a clustered head (use_ordered_embeddings), which litspec does not support; give one with a "
            "plain head."
        )
    for name, plain in (("enable_moe_block", False), ("hidden_size_per_layer_input", 0), ("attention_bias", False)):
        if text.get(name):
            raise InputError(f"{where} sets {name} to {text[name]!r}; litspec supports only {plain!r}.")
    activation = text.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise InputError(f"{where} has hidden_activation {activation!r}; litspec supports only 'gelu_pytorch_tanh'.")
    kinds, count = text.get("layer_types"), number(text, "num_hidden_layers", folder)
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
        raise InputError(
            f"config.json in {str(folder)!r} must list the type of each of the {count} layers in layer_types, "
            f"{FULL!r} or {SLIDING!r}, got {kinds!r}."
        )
    if (shared := text.get("num_kv_shared_layers", count)) != count:
        raise InputError(f"{where} must share keys and values in all {count} layers, but shares them in {shared}.")
    sizes: list[tuple[str, Any, Any]] = [("channels", number(config, "backbone_hidden_size", folder), target.n_embd)]
    sources = _sources(target_model)
    for kind in dict.fromkeys(kinds):
        if kind not in sources:
            raise InputError(f"{where} reads a layer with {kind}, but the target has none.")
        attention = target_model.transformer.h[sources[kind]].attn
        if not isinstance(attention, CausalSelfAttention):
            raise InputError(f"{where} reads keys and values per head, but the target has latent attention.")
        if attention.n_query_groups != target.n_query_groups:
            raise InputError(
                f"{where} reads the keys and values of {target.n_query_groups} groups, but this process holds only "
                f"{attention.n_query_groups}; run the target without tensor parallelism."
            )
        head_size, groups = text.get("head_dim"), text.get("num_key_value_heads")
        if kind == FULL:
            head_size = text.get("global_head_dim") or head_size
            groups = text.get("num_global_key_value_heads") or groups
        sizes += [
            (f"elements per head ({kind})", head_size, attention.head_size),
            (f"key and value heads ({kind})", groups, attention.n_query_groups),
        ]
        if kind == SLIDING:
            sizes.append(("positions per window", text.get("sliding_window"), attention.window))
    for name, found, own in sizes:
        if found != own:
            raise InputError(
                f"{where} was made for a target with {found} {name}, but this one has {own}; give an assistant for "
                "this target."
            )
    if (heads := number(text, "num_attention_heads", folder)) % target.n_query_groups:
        raise InputError(
            f"{where} has {heads} heads, which is not a multiple of the {target.n_query_groups} key and value heads."
        )
    if not target.vocab_size <= (vocab_size := number(text, "vocab_size", folder)) <= target.padded_vocab_size:
        raise InputError(
            f"{where} has a vocabulary of {vocab_size} ids, but the target has {target.vocab_size} "
            f"({target.padded_vocab_size} with padding); give an assistant for this target."
        )
