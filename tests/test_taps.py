"""Heads with reused prefixes, batches and long prompts.

Verification hides wrong drafts, so what is compared is drafts: with those of a fresh session told the whole text at
once, with the states of LitGPT's own model in one pass without a cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import litgpt.model
import pytest
import torch
from checkpoints import lively_weights, tiny_config, write_checkpoint
from heads import Recorder, Told, proposals_of, random_dflash, random_eagle, random_mtp, write_folder
from safetensors.torch import load_file
from torch import Tensor

from litspec import SpecLLM
from litspec.config import GenerateConfig
from litspec.drafters import dflash, tapped
from litspec.drafters.dflash_folder import load_dflash
from litspec.drafters.eagle import EagleSession, load_eagle
from litspec.drafters.mtp import load_mtp
from litspec.drafters.speculative_k import FixedK
from litspec.drafters.tapped import CHUNK, TappedDrafter
from litspec.engine.sequence import Text
from litspec.engine.speculate import Slot
from litspec.engine.target import Slots, TargetSession
from litspec.model import GPT, KVCache
from litspec.sampling import Sampling, make_sampler
from litspec.stopping import StopTokens
from litspec.testing import check_drafter

HEADS = ["dflash", "eagle", "mtp1", "mtp3"]
LAYERS = 6
RNG = random.Random(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(n_layer=LAYERS, block_size=2048)
    return write_checkpoint(tmp_path_factory.mktemp("target"), config, weights=lively_weights(config))


@pytest.fixture(scope="module")
def llm(folder: Path) -> SpecLLM:
    return SpecLLM.load(folder, drafter="none")


@pytest.fixture(scope="module")
def in_bf16(folder: Path) -> SpecLLM:
    return SpecLLM.load(folder, drafter="none", precision="bf16-true")


@pytest.fixture(autouse=True)
def same_prompts_whichever_tests_run() -> None:
    RNG.seed(3)


def head_of(kind: str, llm: SpecLLM, folder: Path) -> TappedDrafter:
    model = llm.placed.model
    if kind == "dflash":
        return load_dflash(random_dflash(model.config, folder / kind, std=0.3), model)
    if kind == "eagle":
        return load_eagle(write_folder(folder / kind, *random_eagle(model.config, std=0.3)), model)
    return load_mtp(write_folder(folder / kind, *random_mtp(model.config, int(kind[3:]), std=0.3)), model)


def ids(size: int) -> list[int]:
    return [RNG.randrange(250) for _ in range(size)]


def states_of_litgpt(model: GPT, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """States of LitGPT's own model after its blocks and after the final norm, `(T, taps * C)`."""
    reference = litgpt.model.GPT(model.config).eval()
    reference.load_state_dict(model.state_dict())
    seen: dict[int, Tensor] = {}
    for i, module in [*enumerate(reference.transformer.h), (-1, reference.transformer.ln_f)]:
        module.register_forward_hook(lambda module, inputs, output, i=i: seen.update({i: output[0]}))
    with torch.inference_mode():
        reference(torch.tensor([list(tokens)]))
    return torch.cat([seen[i] for i in taps], dim=-1)


def fresh(drafter: TappedDrafter, model: GPT, tokens: Sequence[int], k: int) -> tuple[list[int], Tensor]:
    told = Told(drafter, model, tokens, states_of_litgpt(model, tokens, drafter.taps), length=1800)
    told.tell(len(tokens))
    return told.propose(k)


class Running:
    """A text in a slot, whose prompt is read as the engine reads it and whose rounds are scripted."""

    def __init__(self, llm: SpecLLM, drafter: TappedDrafter, slots: Slots, number: int, prompt: Sequence[int]) -> None:
        self.recorder = Recorder()
        target = slots.sessions[number]
        self.session = drafter.start(target, slots.max_length, self.recorder)
        text = Text(len(prompt), slots.max_length, StopTokens())
        self.slot = Slot(text, target, drafter, self.session, self.recorder, FixedK(4))
        self.target, self.taps, self.tokens = target, drafter.taps, list(prompt)
        before = llm.placed.model.prefill
        self.read: list[int] = []

        def watched(idx: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.read.append(idx.size(1))
            return before(idx, *args, **kwargs)

        llm.placed.model.prefill = watched
        with torch.inference_mode():
            self.tokens += self.slot.prefill(prompt, slots, None)[1]
        llm.placed.model.prefill = before

    def propose(self, k: int) -> tuple[list[int], Tensor]:
        self.recorder.logits.clear()
        proposal = self.session.propose(self.tokens[-1], len(self.tokens) - 1, k)
        return proposal.tokens.tolist(), torch.stack(self.recorder.logits)

    @torch.inference_mode()
    def commit(self, proposed: Sequence[int], accepted: int) -> None:
        place = len(self.tokens) - 1
        _, states = self.target.verify(self.tokens[-1], place, torch.tensor(proposed), self.taps)
        committed = [*proposed[:accepted], RNG.randrange(250)]
        self.session.commit(committed, place + 1, states[: len(committed)])
        self.tokens += committed


def assert_drafts(found: tuple[list[int], Tensor], expected: tuple[list[int], Tensor]) -> None:
    torch.testing.assert_close(found[1], expected[1], atol=3e-4, rtol=1e-3)
    assert found[0] == expected[0]


# --- prefixes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_behind_a_prefix_that_is_known_drafts_are_those_of_a_text_read_from_its_beginning(
    llm: SpecLLM, kind: str, tmp_path: Path
) -> None:
    model, drafter = llm.placed.model, head_of(kind, llm, tmp_path)
    k = min(5, drafter.max_k)
    slots = Slots(llm.placed, 3, 1700)
    shared = ids(2 * CHUNK + 60)
    prompts = [
        # slot, prompt, and the rows that the target runs of it
        (0, shared, [CHUNK, CHUNK, 60]),
        (1, [*shared, 7, 8, 9], [63]),  # copied from another slot
        (0, [*shared[: CHUNK + 100], *ids(30)], [130]),  # over the first, which was longer
        (2, shared[: 2 * CHUNK], [CHUNK]),  # at least one token is left to run, in the chunk that it belongs to
        (0, ids(40), [40]),  # nothing in common
        (1, shared, [60]),
    ]
    for number, prompt, rows in prompts:
        text = Running(llm, drafter, slots, number, prompt)
        assert text.read == rows
        for accepted in (0, k, 2):
            assert_drafts(text.propose(k), fresh(drafter, model, text.tokens, k))
            proposed = text.propose(k)[0]
            text.commit(proposed, min(accepted, len(proposed)))
    # A missing prefix would be detected.
    blank = [0] * CHUNK + shared[CHUNK:]
    gap = fresh(drafter, model, shared, k)[1] - fresh(drafter, model, blank, k)[1]
    assert gap.abs().max() > 0.05


def test_entries_of_one_text_do_not_reach_the_next_not_even_a_nan(llm: SpecLLM, tmp_path: Path) -> None:
    for kind in HEADS:
        drafter = head_of(kind, llm, tmp_path)
        slots = Slots(llm.placed, 2, 300)
        Running(llm, drafter, slots, 0, ids(200)).propose(3)
        for buffer in (*drafter.pool(slots.sessions[0]).cache.k, *drafter.pool(slots.sessions[0]).cache.v):
            buffer.fill_(float("nan"))
        text = Running(llm, drafter, slots, 0, ids(20))
        k = min(5, drafter.max_k)
        assert_drafts(text.propose(k), fresh(drafter, llm.placed.model, text.tokens, k))


def test_an_interrupted_copy_leaves_an_empty_slot(
    llm: SpecLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = head_of("eagle", llm, tmp_path)
    slots = Slots(llm.placed, 2, 700)
    first, second = ids(CHUNK + 20), ids(CHUNK + 20)
    for number, prompt in ((0, first), (1, second)):
        Running(llm, drafter, slots, number, prompt)
    copy_from = KVCache.copy_from

    def interrupted(self: KVCache, other: KVCache, length: int) -> None:
        copy_from(self, other, length // 2)
        raise KeyboardInterrupt

    session = drafter.start(slots.sessions[1], 700, Recorder())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(KVCache, "copy_from", interrupted)
        session.resume(first, CHUNK)
    text = Running(llm, drafter, slots, 1, second)  # half of its keys and values were overwritten
    assert text.read == [CHUNK, 20]
    assert_drafts(text.propose(4), fresh(drafter, llm.placed.model, text.tokens, 4))


def test_states_of_other_taps_or_of_plain_texts_are_read_again(llm: SpecLLM, tmp_path: Path) -> None:
    """One engine with several drafters in turn, and a plain text between them."""
    prompt = ids(CHUNK + 20)
    slots = Slots(llm.placed, 1, 700)
    eagle, mtp, dflash = (head_of(kind, llm, tmp_path) for kind in ("eagle", "mtp1", "dflash"))
    assert Running(llm, eagle, slots, 0, prompt).read == [CHUNK, 20]
    for drafter in (mtp, dflash, eagle):
        text = Running(llm, drafter, slots, 0, [*prompt, 3])
        assert text.read == [CHUNK, 21]
        assert_drafts(text.propose(3), fresh(drafter, llm.placed.model, text.tokens, 3))
    with torch.inference_mode():
        slots.begin(0, prompt, ())
        while slots.sessions[0].unread:
            slots.sessions[0].read()
    text = Running(llm, eagle, slots, 0, prompt)
    assert_drafts(text.propose(3), fresh(eagle, llm.placed.model, text.tokens, 3))


@pytest.mark.parametrize("kind", HEADS)
def test_of_a_long_prompt_no_more_than_a_chunk_of_states_is_kept(llm: SpecLLM, kind: str, tmp_path: Path) -> None:
    drafter = head_of(kind, llm, tmp_path)
    slots = Slots(llm.placed, 1, 1800)
    kept: list[int] = []
    commit = type(drafter.start(slots.sessions[0], 1800, Recorder())).commit

    class Watching(drafter.start(slots.sessions[0], 1800, Recorder()).__class__):
        def commit(self, *args: Any) -> None:
            commit(self, *args)
            # Rows in storage, of which a view may show a part only.
            states = self.pending._hidden
            width = llm.placed.model.config.n_embd * len(drafter.taps)
            kept.append(sum(each.untyped_storage().nbytes() // each.element_size() for each in states) // width)

    start = drafter.start
    drafter.start = lambda *args: _as(start(*args), Watching)
    text = Running(llm, drafter, slots, 0, ids(3 * CHUNK + 100))
    assert text.read == [CHUNK, CHUNK, CHUNK, 100]
    # Each chunk runs at once, except the state of its last token, whose next token is not known yet.
    assert kept == [0, 0, 0, 100, 101]
    assert len(text.target._borders) == 3 and all(len(state) == 1 for state in text.target._borders)


def _as(session: Any, kind: type) -> Any:
    session.__class__ = kind
    return session


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_texts_drafted_together_get_the_drafts_of_a_fresh_pass_over_each(
    llm: SpecLLM, kind: str, tmp_path: Path
) -> None:
    model, drafter = llm.placed.model, head_of(kind, llm, tmp_path)
    slots = Slots(llm.placed, 6, 800)
    texts = [Running(llm, drafter, slots, n, ids(size)) for n, size in ((0, 3), (1, 70), (3, CHUNK + 30), (4, 1))]
    most = min(6, drafter.max_k)
    rng = random.Random(1)
    widths: list[int] = []
    layers = drafter.network.layers if kind == "dflash" else drafter.layers.transformer.h
    hooks = [each.register_forward_hook(lambda module, x, y: widths.append(1)) for each in layers]
    for turn in range(6):
        # Texts come and go, so slots between those that run are idle, and hold another text.
        asked = [text for i, text in enumerate(texts) if turn == 0 or (turn + i) % 3]
        k = [rng.randint(1, most) for _ in asked]
        for text in asked:
            text.recorder.logits.clear()
        widths.clear()
        found = drafter.propose_batch(
            [text.session for text in asked],
            [text.tokens[-1] for text in asked],
            [len(text.tokens) - 1 for text in asked],
            k,
        )
        if kind == "dflash":
            assert len(widths) == 1, "one forward of the block"
        for text, own, proposal in zip(asked, k, found):
            tokens, _ = fresh(drafter, model, text.tokens, own)
            assert proposal.tokens.tolist() == tokens and len(tokens) == own
            alone = Running.propose(text, own)
            assert_drafts(alone, fresh(drafter, model, text.tokens, own))
            text.commit(tokens, rng.randint(0, own))
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("kind", ["eagle", "mtp1"])
def test_a_chain_runs_its_layer_once_a_step_for_all_texts(llm: SpecLLM, kind: str, tmp_path: Path) -> None:
    drafter = head_of(kind, llm, tmp_path)
    slots = Slots(llm.placed, 4, 200)
    texts = [Running(llm, drafter, slots, n, ids(5 + n)) for n in range(4)]
    sizes: list[int] = []
    run = drafter.layers.run
    drafter.layers.run = lambda layer, x, *args: (sizes.append(x.size(0)), run(layer, x, *args))[1]
    for text in texts:
        text.slot.speculative_k = 4
    drafter.propose_batch([t.session for t in texts], [t.tokens[-1] for t in texts], [5, 6, 7, 8], [4] * 4)
    # What was told, in blocks as wide as the longest, then three steps: the first draft needs none.
    assert sizes == [4 * 8, 4, 4, 4]


def test_slots_that_run_along_out_of_every_window_leave_no_nan(llm: SpecLLM, tmp_path: Path) -> None:
    """A row without visible keys has no valid softmax; its results must not reach a text."""
    folder = random_dflash(llm.placed.model.config, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= dict(num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    config |= dict(sliding_window=8, use_sliding_window=True)
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace("layers.0", "layers.1"): weight for name, weight in weights.items() if "layers.0" in name}
    drafter = load_dflash(write_folder(folder, config, weights), llm.placed.model)
    assert drafter.config.windows == (8, 8)
    slots = Slots(llm.placed, 3, 600)
    texts = [Running(llm, drafter, slots, n, ids(20 + n)) for n in range(3)]
    outer = [texts[0], texts[2]]
    drafter.propose_batch([t.session for t in outer], [t.tokens[-1] for t in outer], [20, 22], [4, 4])
    cache = drafter.pool(slots.sessions[0]).cache
    assert all(buffer.isfinite().all() for buffer in (*cache.k, *cache.v))
    assert cache.k[1][1, :, -1].any(), "the slot between them ran along"
    assert_drafts(texts[1].propose(4), fresh(drafter, llm.placed.model, texts[1].tokens, 4))


WAYS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "coupled": dict(temperature=0.9, top_k=40, sampler="coupled"),
    "rejection": dict(temperature=0.9, top_k=40),
    "rejection of all ids, penalties": dict(temperature=1.0, presence_penalty=0.5),
    "coupled, penalties": dict(temperature=1.0, sampler="coupled", repetition_penalty=1.2, bad_words=["a"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("kind", HEADS)
def test_texts_are_the_same_alone_in_a_batch_and_without_a_head(
    llm: SpecLLM, in_bf16: SpecLLM, kind: str, precision: str, tmp_path: Path
) -> None:
    plain = llm if precision == "32-true" else in_bf16
    start = "".join(RNG.choice("abcdefgh ") for _ in range(CHUNK + 40))
    prompts = ["a", start + "x", "Captain Wentworth had no fortune.", start + "yz"]
    drafted = plain.with_drafter(head_of(kind, plain, tmp_path))
    for way, settings in WAYS.items():
        settings = settings | dict(max_new_tokens=10, min_new_tokens=10, seed=2, speculative_k=3)
        alone = [drafted.generate(p, index=i, **settings).token_ids for i, p in enumerate(prompts)]
        texts = drafted.generate(prompts, batch_size=4, **settings)
        assert [text.token_ids for text in texts] == alone, way
        assert sum(text.stats.proposed for text in texts) > 30
        if "rejection" not in way:
            texts = plain.generate(prompts, batch_size=4, **settings)
            assert [text.token_ids for text in texts] == alone, way


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose heads have no small products in bfloat16, see `engine.rows.SMALL_PRODUCT`."""
    config = tiny_config(n_layer=LAYERS, block_size=2048, n_embd=192, intermediate_size=384)
    return write_checkpoint(tmp_path_factory.mktemp("wide"), config, weights=lively_weights(config))


@pytest.fixture(scope="module")
def wide_in_bf16(wide: Path) -> SpecLLM:
    return SpecLLM.load(wide, drafter="none", precision="bf16-true")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_with_the_rejection_sampler_a_text_is_that_of_its_prompt_alone_in_any_batch(
    wide: Path, precision: str, tmp_path: Path
) -> None:
    plain = SpecLLM.load(wide, drafter="none", precision=precision)
    start = "".join(RNG.choice("abcdefgh ") for _ in range(CHUNK + 40))
    prompts = [
        "a",
        "ab c",
        start + "x",
        "Captain Wentworth had no fortune.",
        start + "yz",
        "q" * 63,
        "x y z " * 20,
        "b",
    ]
    for kind in HEADS:
        head = head_of(kind, plain, tmp_path)
        drafted = plain.with_drafter(head)
        for k in {3, min(7, head.max_k)}:
            settings = dict(max_new_tokens=12, min_new_tokens=12, seed=2, speculative_k=k, temperature=0.8, top_k=50)
            alone = [drafted.generate(p, index=i, **settings).token_ids for i, p in enumerate(prompts)]
            config = GenerateConfig(**settings)
            for size in (2, 5, 8):
                # In another order each time; the last ones run in a batch that is not full.
                order = RNG.sample(range(8), 8)
                found = dict(drafted.complete(((i, prompts[i], config, i) for i in order), slots=size))
                assert [found[i].token_ids for i in range(8)] == alone, (kind, k, size)
        rows = head.step_rows(_target(plain))
        assert precision == "32-true" or (rows is not None and head.most_texts(_target(plain), rows) >= 8)


def _target(llm: SpecLLM) -> TargetSession:
    return Slots(llm.placed, 1, 64).sessions[0]


@pytest.mark.parametrize(("most", "groups"), [(8, [5]), (2, [2, 2, 1]), (1, [1] * 5)])
@pytest.mark.parametrize(("kind", "steps"), [("eagle", 3), ("mtp1", 3), ("mtp3", 5), ("dflash", 1)])
def test_rejection_texts_run_together_as_far_as_rows_keep_their_bits(
    llm: SpecLLM,
    kind: str,
    steps: int,
    most: int,
    groups: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = head_of(kind, llm, tmp_path)
    # So many texts; a DFlash head's other products have as many rows as its blocks.
    block = drafter.rows if kind == "dflash" else 0
    for module in (tapped, dflash):
        monkeypatch.setattr(module, "class_limit", lambda layers, rows, at_least: most * max(rows[-1], block))
    slots = Slots(llm.placed, 5, 200)
    texts = [Running(llm, drafter, slots, n, ids(4)) for n in range(5)]
    for text in texts:
        text.session.sampler = make_sampler(Sampling(temperature=0.8, top_k=50), seed=1)
    sizes: list[int] = []
    where, name = (drafter, "_run") if kind == "dflash" else (drafter.layers, "run")
    run = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args: (sizes.append(args[2].first.size(0)), run(*args))[1])
    drafter.propose_batch([t.session for t in texts], [t.tokens[-1] for t in texts], [4] * 5, [3] * 5)
    # Rows that were told, in each layer, and two steps after the first draft; of a DFlash head the block alone.
    assert sorted(sizes) == sorted(groups * steps)


@pytest.mark.parametrize("most", [24, 5])
@pytest.mark.parametrize("kind", ["eagle", "mtp1", "dflash"])
def test_a_head_whose_rows_feel_how_many_they_are_is_found(
    wide_in_bf16: SpecLLM, kind: str, most: int, tmp_path: Path
) -> None:
    head, target = head_of(kind, wide_in_bf16, tmp_path), _target(wide_in_bf16)
    assert head.step_rows(target) is not None
    head = head_of(kind, wide_in_bf16, tmp_path)

    def odd(project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: project(x) + (x.size(0) > most)

    if kind == "mtp1":
        head.ends = (head.ends[0]._replace(project=odd(head.ends[0].project)),)
    elif kind == "eagle":
        head.project = odd(head.project)
    else:
        head.network.fc.forward = odd(head.network.fc.forward)
    rows = head.step_rows(target)
    if most == 24:
        assert rows is not None and 2 <= head.most_texts(target, rows) <= 24 // rows
    elif rows is not None:
        assert rows * head.most_texts(target, rows) <= most and kind != "dflash"


@pytest.mark.slow
def test_on_a_compiled_target_drafts_and_texts_are_the_same(tmp_path: Path) -> None:
    config = tiny_config(n_layer=4)  # graphs take seconds a layer
    folder = write_checkpoint(tmp_path / "target", config, weights=lively_weights(config))
    compiled, eager = (SpecLLM.load(folder, drafter="none", verify_width=4, compile=own) for own in (True, False))
    coupled = dict(max_new_tokens=12, min_new_tokens=12, temperature=0.9, top_k=40, sampler="coupled", seed=5)
    greedy = dict(max_new_tokens=12, temperature=0.0)
    for kind, settings in (("eagle", coupled), ("mtp3", greedy)):
        head = head_of(kind, compiled, tmp_path)
        text = compiled.with_drafter(head).generate("abc", speculative_k=3, **settings)
        assert text.token_ids == eager.generate("abc", **settings).token_ids
        assert text.stats.proposed > 15
        # States of a compiled verification differ from others in their last bits only.
        drafts = [proposals_of(each, head_of(kind, each, tmp_path), ["abc"]) for each in (compiled, eager)]
        assert drafts[0] == drafts[1] and len({tuple(proposal) for proposal in drafts[0][0]}) > 3


@pytest.mark.slow
def test_interrupted_texts_leave_nothing_and_streams_run_side_by_side(llm: SpecLLM, tmp_path: Path) -> None:
    for kind in HEADS:
        drafted = llm.with_drafter(head_of(kind, llm, tmp_path))
        settings: dict[str, Any] = dict(max_new_tokens=20, temperature=0.8, sampler="coupled", seed=4, speculative_k=3)
        prompts = ["a b c", "d e f" * 130]
        expected = [llm.generate(prompt, **settings).text for prompt in prompts]
        streams = [drafted.generate(prompt, stream=True, **settings) for prompt in prompts]
        found = ["", ""]
        for _ in range(21):
            found = [own + next(stream, "") for own, stream in zip(found, streams)]
        assert found == expected
        broken = drafted.generate(prompts[1], stream=True, **settings)
        next(broken)
        broken.close()
        assert [drafted.generate(prompt, **settings).text for prompt in prompts] == expected


# --- a drafter that keeps what is stale -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_head_that_reuses_a_prefix_wrongly_is_detected(llm: SpecLLM, tmp_path: Path) -> None:
    drafter = head_of("eagle", llm, tmp_path)
    check_drafter(drafter, llm, rounds=2, draws=0)
    start = drafter.start

    class Blank(EagleSession):
        """Claims to know a prefix whose keys and values are lost."""

        def resume(self, prompt: Sequence[int], most: int) -> int:
            held = super().resume(prompt, most)
            for buffer in (*self.pool.cache.k, *self.pool.cache.v):
                buffer[self.number, :, :held] = 0
            return held

    drafter.start = lambda *args: _as(start(*args), Blank)
    with pytest.raises(AssertionError, match="Reuse"):
        check_drafter(drafter, llm, rounds=1, draws=0)

    class Shifted(EagleSession):
        """Reuses one row too few, so that all later rows are at wrong positions."""

        def take_up(self, tokens: list[int], carried: Any) -> None:
            self.filled -= 1

    drafter.start = lambda *args: _as(start(*args), Shifted)
    with pytest.raises(AssertionError, match="Reuse"):
        check_drafter(drafter, llm, rounds=1, draws=0)


@pytest.mark.parametrize("kind", HEADS)
def test_the_memory_of_a_head_is_reported(llm: SpecLLM, kind: str, tmp_path: Path) -> None:
    drafter = head_of(kind, llm, tmp_path)
    slots = Slots(llm.placed, 4, 1500)
    cache = drafter.pool(slots.sessions[0]).cache
    held = sum(buffer.nbytes for buffer in (*cache.k, *cache.v)) / 4
    states = CHUNK * len(drafter.taps) * llm.placed.model.config.n_embd * 4
    assert drafter.memory(1500) == held + states


def test_a_batch_of_heads_does_not_cross_the_size_where_bf16_products_change_their_kernel(
    in_bf16: SpecLLM, tmp_path: Path
) -> None:
    # Two texts of two or four rows would cross it in layers of 32 x 64; a single one does not.
    for kind in ("eagle", "mtp1", "dflash"):
        assert head_of(kind, in_bf16, tmp_path).step_rows(_target(in_bf16)) is None
