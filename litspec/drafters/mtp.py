"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): drafting with MTP layers of the target's own checkpoint.

With f_p the target's state at position p, e_q its embedding of the token at q, and n committed rows:

    z^0_p = norm(block_0(W [norm(e_(p+1)); norm(f_p)]))              d_1 = argmax head(z^0_(n-1))
    z^i_p = norm(block_i(W [norm(e_(p+1+i)); norm(z^(i-1)_p)]))      d_(i+1) = argmax head(z^i_(n-1))

So the last i rows of layer i read i of this round's drafts. After the round these rows are stale and are run again with
the committed tokens. A single layer is instead run k times, each time on its own normed output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from litspec.drafters.autoregressive import EXACT_ROWS
from litspec.drafters.base import Cost, Proposal
from litspec.drafters.folders import CONFIG, SAFETENSORS, open_published
from litspec.drafters.hf_layers import layer_config, litgpt_layer, nested, number, take
from litspec.drafters.tapped import (
    CHUNK,
    MAX_K,
    OVERHANG,
    STEP_ROWS,
    Layers,
    Places,
    TappedDrafter,
    TappedSession,
    cache_bytes,
    draw_chain,
    embedding_of,
    head_bytes,
    head_logits,
    in_multiples,
    inputs_of,
    leading,
    linear,
    load_layers,
    norm,
    padded,
    places_of,
)
from litspec.errors import InputError
from litspec.model import GPT, KVCache
from litspec.sampling import Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession

MAX_LAYERS = 8


class Ends(NamedTuple):
    """The operations before and after the block of one layer, as functions of rows."""

    norm_embedding: Callable[[Tensor], Tensor]
    norm_hidden: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    norm_output: Callable[[Tensor], Tensor]


class Mtp(TappedDrafter):
    """Drafts with MTP layers, see `drafters.Drafter`. Made by `load_mtp`.

    Args:
        layers: The blocks of the layers.
        ends: The other operations of each layer.
        tap: The block of the target whose state the first layer reads.
        hidden_first: Whether the projection's input begins with the state instead of the embedding.
        step_bytes: Bytes of weights read per token.
    """

    def __init__(self, layers: Layers, ends: Sequence[Ends], *, tap: int, hidden_first: bool, step_bytes: int) -> None:
        self.layers = layers
        self.ends = tuple(ends)
        self.taps = (tap,)
        self.max_k = MAX_K if len(ends) == 1 else len(ends)
        self.hidden_first = hidden_first
        self._step_bytes = step_bytes

    @property
    def name(self) -> str:
        return "mtp"

    @property
    def block_size(self) -> int:
        return self.layers.config.block_size

    @property
    def rows(self) -> int:
        return len(self.ends)

    def cost(self, k: int) -> Cost:
        return Cost(k * self._step_bytes, k)

    def memory(self, max_length: int) -> int:
        like = embedding_of(self.layers).weight
        states = CHUNK * like.size(1) * like.element_size()
        return cache_bytes(self.layers, self.limit(max_length) + OVERHANG) + states

    def make_cache(self, target: TargetSession, length: int, count: int) -> KVCache:
        return self.layers.make_cache(length, width=OVERHANG, batch_size=count)

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> MtpSession:
        return MtpSession(self, target, max_length, sampler)

    @property
    def exact(self) -> Sequence[int]:
        # The last layer runs one row fewer than there are layers.
        return STEP_ROWS if len(self.ends) == 1 else (-(-(len(self.ends) - 1) // EXACT_ROWS) * EXACT_ROWS,)

    def absorb(self, sessions: Sequence[MtpSession], sizes: Sequence[int], members: range, width: int | None) -> None:
        """Runs pending rows in the first layer, and in the other layers as far as their tokens are committed."""
        device = sessions[0].device
        taken = [session.pending.take(size) for session, size in zip(sessions, sizes)]
        running = list(sessions)
        states = [own for _, own in taken]
        for session, (tokens, _) in zip(sessions, taken):
            session.tokens += tokens
            session.filled += len(tokens)
        for i in range(len(self.ends)):
            ready: list[_Rows] = []
            for session, own in zip(running, states):
                inputs = torch.cat((session.inputs[i], own))
                start = session.rows[i]
                size = max(0, session.filled - i) - start
                # A copy, to free the larger tensor.
                session.inputs[i] = inputs[size:].clone()
                if size:
                    # Row p of layer i has the token at position p + 1 + i.
                    behind = torch.tensor(session.tokens[start + i : start + i + size], device=device)
                    ready.append(_Rows(session, behind, inputs[:size], start))
                    session.rows[i] += size
            if not ready:
                break
            running = [each.session for each in ready]
            states = self._run_rows(i, ready, members, width)
            if i == 0:
                for session, own in zip(running, states):
                    session.last = own[-1:].clone()

    def draft(
        self,
        sessions: Sequence[MtpSession],
        tokens: Sequence[int],
        k: Sequence[int],
        members: range,
        exact: int | None,
    ) -> list[Proposal]:
        model = sessions[0].target.model
        state = padded([session.last for session in sessions], [session.number for session in sessions], members)
        inputs = inputs_of(sessions, members, [session.filled + 1 for session in sessions], max(k))
        make_step = self._chain if len(self.ends) == 1 else self._layer_by_layer
        step = make_step(sessions, state, max(k), members, exact)
        logits = partial(in_multiples, partial(head_logits, model), exact)
        return draw_chain(sessions, members, inputs, logits(state), lambda token, i: logits(step(token, i)), k)

    def try_rows(
        self, target: TargetSession, ids: Tensor, states: Tensor, places: Places, cache: KVCache
    ) -> list[Tensor]:
        found = [states.flatten(0, 1)]
        for i in range(len(self.ends)):
            found.append(self._run(i, target.model, ids.flatten(), found[-1], places, cache, exact=True))
        return [*found, head_logits(target.model, found[-1])]

    def _chain(
        self, sessions: Sequence[MtpSession], state: Tensor, k: int, members: range, exact: int | None
    ) -> Callable[[Tensor, int], Tensor]:
        """Steps of a single layer, each on the output of the previous step."""
        model, cache, width = sessions[0].target.model, self._cache(sessions, members), exact or 1
        places = places_of(cache, members, {each.number: each.filled for each in sessions}, k + width)

        def step(token: Tensor, i: int) -> Tensor:
            nonlocal state
            rows = leading(token, width), leading(state, width)
            y = self._run(0, model, *rows, places.after(i), cache, exact=exact is not None)
            state = y[::width].contiguous()
            return state

        return step

    def _layer_by_layer(
        self, sessions: Sequence[MtpSession], state: Tensor, k: int, members: range, exact: int | None
    ) -> Callable[[Tensor, int], Tensor]:
        """Steps of successive layers, each on the rows whose tokens are this round's drafts."""
        drafts: list[Tensor] = []
        before = [session.inputs[0][:0] for session in sessions]
        numbers = [session.number for session in sessions]

        def step(token: Tensor, i: int) -> Tensor:
            nonlocal before
            drafts.append(token)
            layer, drafted = i + 1, torch.stack(drafts, 1)
            rows = []
            for session, own in zip(sessions, before):
                states = torch.cat((session.inputs[layer], own))
                behind = drafted[session.number - members.start, -states.size(0) :]
                rows.append(_Rows(session, behind, states, session.rows[layer]))
            before = self._run_rows(layer, rows, members, exact)
            return padded([own[-1:] for own in before], numbers, members)

        return step

    def _cache(self, sessions: Sequence[MtpSession], members: range) -> KVCache:
        return sessions[0].pool.cache.sequences(members.start, members.stop)

    def _run_rows(self, layer: int, rows: Sequence[_Rows], members: range, width: int | None) -> list[Tensor]:
        """A layer's normed output for rows of several texts, `(n, C)` per text; `width` as in `absorb`."""
        sessions, numbers = [each.session for each in rows], [each.session.number for each in rows]
        cache, exact = self._cache(sessions, members), width is not None
        width = width or max(each.tokens.size(0) for each in rows)
        places = places_of(cache, members, {each.session.number: each.start for each in rows}, width)
        tokens = padded([each.tokens for each in rows], numbers, members, width)
        states = padded([each.states for each in rows], numbers, members, width)
        y = self._run(layer, sessions[0].target.model, tokens, states, places, cache, exact=exact)
        y = y.view(len(members), width, -1)
        return [y[each.session.number - members.start, : each.tokens.size(0)] for each in rows]

    def _run(
        self,
        layer: int,
        model: GPT,
        tokens: Tensor,
        states: Tensor,
        places: Places,
        cache: KVCache,
        *,
        exact: bool,
    ) -> Tensor:
        """A layer's normed output `(N, C)` for rows of a token and a state."""
        ends = self.ends[layer]
        parts = [ends.norm_embedding(embedding_of(model)(tokens)), ends.norm_hidden(states)]
        x = ends.project(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return ends.norm_output(self.layers.run(layer, x, places, cache, exact))


class _Rows(NamedTuple):
    """Rows of one text for one layer: tokens `(n,)`, states `(n, C)`, and the position of the first row."""

    session: MtpSession
    tokens: Tensor
    states: Tensor
    start: int


class MtpSession(TappedSession):
    """One text, see `TappedSession`.

    Layer i keeps keys and values of the rows whose token is committed: i fewer than the first layer.

    Attributes:
        tokens: Token of each final row of the first layer.
        rows: Number of final rows of each layer.
        inputs: For each layer, the previous layer's output of the rows that are not final yet.
        last: The first layer's output of its last final row, `(1, C)`.
    """

    last: Tensor

    def __init__(self, drafter: Mtp, target: TargetSession, max_length: int, sampler: Sampler) -> None:
        super().__init__(drafter, target, max_length, sampler)
        like = embedding_of(drafter.layers).weight
        self.tokens: list[int] = []
        self.rows = [0] * len(drafter.ends)
        self.inputs = [like.new_empty(0, like.size(1)) for _ in drafter.ends]

    def take_up(self, tokens: list[int], carried: Any) -> None:
        self.tokens = tokens[1:]
        self.rows = [self.filled - i for i in range(len(self.rows))]
        self.inputs = list(carried)

    def carry(self) -> Any:
        return tuple(self.inputs)


# --- Loading ----------------------------------------------------------------------------------------------------------


class _Naming(NamedTuple):
    """How a family names its layers: the pattern of a layer's prefix, and the names of its additional weights."""

    pattern: str
    norm_embedding: str
    norm_hidden: str
    project: str
    norm_output: str
    hidden_first: bool = False


# Named after the first family that used each naming.
_NAMINGS = {
    "DeepSeek": _Naming(r"^model\.layers\.(\d+)\.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "Qwen": _Naming(r"^mtp\.layers\.(\d+)\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "MiMo": _Naming(
        r"^model\.mtp_layers\.(\d+)\.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        hidden_first=True,
    ),
}
# Copies of the target's own weights, which are not read.
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
# Families whose norms multiply by 1 + weight.
_UNIT_OFFSET = ("qwen3_next", "qwen3_5")


def load_mtp(folder: str | Path, target_model: GPT, *, post_norm: bool = True) -> Mtp:
    """Reads the MTP layers of a target, from its Hugging Face checkpoint or from a folder of extracted layers.

    Args:
        folder: A folder with `config.json` and safetensors, of which only the MTP layers are read.
        target_model: The target; the layers are put on its device, in its precision.
        post_norm: Whether the first layer reads the target's state after the final norm, as in all families here, or
            before it. A wrong choice lowers acceptance; the text stays correct.

    Raises:
        InputError: The folder has no MTP layers, or they are of an unsupported kind or for another target.
    """
    folder = Path(folder)
    published = open_published(folder)
    config = published.config | nested(published.config, "text_config", folder)
    target = target_model.config
    like = embedding_of(target_model).weight
    n_layer = config.get("num_hidden_layers", target.n_layer)
    _check_target(config, n_layer, target_model, folder)
    weights = published.read(name for name in published.files if _is_mtp(name, n_layer))
    naming, parts = _split(weights, n_layer, folder)
    if any(config.get("model_type", "").startswith(name) for name in _UNIT_OFFSET):
        parts = [{name: 1 + w if "norm" in name else w for name, w in part.items()} for part in parts]

    eps = config.get("rms_norm_eps", 1e-6)
    ends: list[Ends] = []
    named: dict[str, Tensor] = {}
    for i, part in enumerate(parts):
        names = (naming.norm_embedding, naming.norm_hidden, naming.project, naming.norm_output)
        embedding, hidden, project, output = (take(part, f"{name}.weight", folder) for name in names)
        if tuple(project.shape) != (target.n_embd, 2 * target.n_embd):
            raise InputError(
                f"MTP layer {i} in {str(folder)!r} has a projection of shape {tuple(project.shape)}; the target's "
                f"{target.n_embd} channels need {(target.n_embd, 2 * target.n_embd)}."
            )
        ends.append(
            Ends(norm(embedding, eps, like), norm(hidden, eps, like), linear(project, like), norm(output, eps, like))
        )
    block = layer_config(
        config, parts[0], folder, first_layer=n_layer, n_layer=len(parts), block_size=target.block_size
    )
    for i, part in enumerate(parts):
        named |= {f"transformer.h.{i}.{name}": weight for name, weight in litgpt_layer(part, folder).items()}
    layers, size = load_layers(lambda: Layers(block), named, folder, like)
    projection = 2 * target.n_embd**2 * like.element_size()
    return Mtp(
        layers,
        ends,
        tap=-1 if post_norm else target.n_layer - 1,
        hidden_first=naming.hidden_first or bool(config.get("mtp_hidden_states_first", False)),
        step_bytes=size // len(parts) + projection + head_bytes(target_model),
    )


def extract_mtp_layers(source: str | Path, out: str | Path) -> int:
    """Writes the MTP layers of a Hugging Face checkpoint to a separate folder, which `load_mtp` can read.

    Args:
        source: A folder with `config.json` and safetensors.
        out: The folder to write; it is created.

    Returns:
        Number of tensors written.

    Raises:
        InputError: `source` has no MTP layers, or `out` already holds weights.
    """
    source, out = Path(source), Path(out)
    published = open_published(source, role="checkpoint_dir")
    config = published.config
    n_layer = number(config | nested(config, "text_config", source), "num_hidden_layers", source)
    if taken := [*out.glob("*.safetensors"), *out.glob("*.pth")]:
        raise InputError(f"{str(out)!r} already holds weights ({taken[0].name}); give another folder.")
    weights = published.read(name for name in published.files if _is_mtp(name, n_layer))
    _split(weights, n_layer, source)
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({name: weight.contiguous() for name, weight in weights.items()}, out / SAFETENSORS)
    return len(weights)


def _check_target(config: Mapping[str, Any], n_layer: int, target_model: GPT, folder: Path) -> None:
    target = target_model.config
    for name, found, own in (
        ("layers", n_layer, target.n_layer),
        ("channels", config.get("hidden_size", target.n_embd), target.n_embd),
    ):
        if found != own:
            raise InputError(
                f"The MTP layers in {str(folder)!r} belong to a model of {found} {name}, but the target has {own}; "
                "give the target's own."
            )
    vocab_size = config.get("vocab_size", target.vocab_size)
    if not target.vocab_size <= vocab_size <= target.padded_vocab_size:
        raise InputError(
            f"The MTP layers in {str(folder)!r} belong to a model with a vocabulary of {vocab_size} ids, but the "
            f"target has {target.vocab_size} ({target.padded_vocab_size} with padding); give the target's own."
        )


def _layer_of(name: str, n_layer: int) -> tuple[str, int, str] | None:
    """For a weight of an MTP layer: the family, the layer's number, and the rest of the name."""
    for family, naming in _NAMINGS.items():
        if found := re.match(naming.pattern, name):
            number = int(found.group(1)) - (n_layer if family == "DeepSeek" else 0)
            # Smaller numbers are the target's own decoder layers.
            return (family, number, name[found.end() :]) if number >= 0 else None
    return None


def _is_mtp(name: str, n_layer: int) -> bool:
    """Whether a weight belongs to an MTP layer or is shared by all of Qwen's, and is not a copy of the target's."""
    return not name.endswith(_COPIES) and (name.startswith("mtp.") or _layer_of(name, n_layer) is not None)


def _split(weights: Mapping[str, Tensor], n_layer: int, folder: Path) -> tuple[_Naming, list[dict[str, Tensor]]]:
    """The naming, and the weights of each layer, including those that all layers share."""
    layers: dict[int, dict[str, Tensor]] = {}
    families: set[str] = set()
    shared: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if place := _layer_of(name, n_layer):
            family, number, rest = place
            families.add(family)
            layers.setdefault(number, {})[rest] = weight
        else:
            shared[name.removeprefix("mtp.")] = weight
    if len(families) != 1:
        raise InputError(
            f"{str(folder)!r} holds no MTP layers; they are named 'model.layers.{n_layer}.eh_proj.weight', "
            "'mtp.layers.0...' or 'model.mtp_layers.0...'."
        )
    if sorted(layers) != list(range(len(layers))) or len(layers) > MAX_LAYERS:
        raise InputError(
            f"{str(folder)!r} must hold 1 to {MAX_LAYERS} MTP layers with consecutive numbers; it has {sorted(layers)}."
        )
    return _NAMINGS[families.pop()], [shared | layers[i] for i in sorted(layers)]
