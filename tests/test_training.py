"""`litspec.training` on tiny random models: training data, gradients, and interrupted runs."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litgpt.model
import pytest
import torch
from checkpoints import byte_level_tokenizer, lively_weights, tiny_config, write_checkpoint
from torch import Tensor
from training_child import child

from litspec import SpecLLM
from litspec.checkpoint import open_checkpoint, read_state_dict
from litspec.drafters.dflash import DFlashSession
from litspec.engine.target import TargetSession
from litspec.errors import InputError
from litspec.sampling import Sampling, make_sampler
from litspec.text import TextCodec
from litspec.training import distill
from litspec.training.dflash import BlockDrafter, network_config
from litspec.training.draft_model import DraftModel
from litspec.training.measure import expected_rounds
from litspec.training.target import FrozenTarget, StatesOf
from litspec.training.texts import Text, cut, is_held_out, read_prompts

CPU = torch.device("cpu")
PROMPTS = [f"{word} number {i}" for i, word in enumerate(["one", "another", "a third", "some other"] * 6)]
FAST = {"max_new_tokens": 12, "batch_size": 4, "measured_texts": 4, "held_out": 0.2, "accelerator": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a start for a draft, and prompts."""
    path = tmp_path_factory.mktemp("training")
    config = tiny_config(n_layer=3, block_size=64)
    write_checkpoint(path / "target", config, weights=lively_weights(config))
    small = tiny_config(n_layer=1, block_size=64, padded_vocab_size=260)
    write_checkpoint(path / "draft", small, seed=1)
    (path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


def some_texts(count: int = 3, seed: int = 0) -> list[Text]:
    generator = torch.Generator().manual_seed(seed)
    return [Text(torch.randint(256, (20 + 3 * i,), generator=generator), 5 + i, {"prompt": "a"}) for i in range(count)]


def frozen(folder: Path, taps: tuple[int, ...] = ()) -> FrozenTarget:
    return FrozenTarget(open_checkpoint(folder / "target"), torch.float32, CPU, taps)


def draft_model(folder: Path, target: FrozenTarget, **settings: Any) -> DraftModel:
    start = open_checkpoint(folder / "draft")
    more: dict[str, Any] = {"tokenizer_dir": start.dir, "dtype": torch.float32, "k": 4, "vocab_size": 258} | settings
    return DraftModel(start.config, read_state_dict(start), target, **more)


def block_drafter(folder: Path, **settings: Any) -> BlockDrafter:
    torch.manual_seed(0)
    config = open_checkpoint(folder / "target").config
    network = network_config(config, layers=2, block_size=4, mask_token_id=256)
    return BlockDrafter(network, frozen(folder, network.taps), **settings)


# --- texts ---


def test_prompts_are_lines_objects_or_pieces_of_text(folder: Path, tmp_path: Path) -> None:
    codec = TextCodec(folder / "target", open_checkpoint(folder / "target").config)
    (tmp_path / "a.txt").write_text("first\n\nsecond\nfirst\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt": "third", "id": 7}\n', encoding="utf-8")
    (tmp_path / "c.py").write_text("x" * 70, encoding="utf-8")
    (tmp_path / "d.bin").write_bytes(b"\xff\x00\xff")
    (tmp_path / ".hidden").write_text("no")
    found = read_prompts(tmp_path, codec, limit=100, seed=0)
    # One token a byte here: two pieces of 32 fit, which are the same prompt.
    assert [line["prompt"] for line in found] == ["first", "second", "third", "x" * 32]
    assert found[2]["id"] == 7
    assert [p["prompt"] for p in read_prompts(tmp_path / "a.txt", codec, limit=9, seed=0, prompt_tokens=6)] == [
        "first\n",
        "\nsecon",
        "d\nfirs",
    ]
    few = [read_prompts(tmp_path, codec, limit=2, seed=seed) for seed in (3, 3)]
    assert few[0] == few[1] and len(few[0]) == 2


def test_a_cut_splits_no_character(folder: Path) -> None:
    codec = TextCodec(folder / "target", open_checkpoint(folder / "target").config)
    assert list(cut("abcé" * 2, codec, 4)) == ["abc", "abc"]


def test_a_prompt_is_held_out_whatever_stands_beside_it() -> None:
    prompts = [f"prompt {i}" for i in range(4000)]
    out = [is_held_out(prompt, 0.1) for prompt in prompts]
    assert 320 < sum(out) < 480
    assert out[::-1] == [is_held_out(prompt, 0.1) for prompt in reversed(prompts)]


# --- the target ---


def test_states_are_those_that_litspec_hands_to_drafters(folder: Path) -> None:
    ids = some_texts(1)[0].ids.unsqueeze(0)
    target = frozen(folder, taps=(0, 2, -1))
    model = SpecLLM.load(folder / "target", drafter="none", accelerator="cpu").placed.model
    logits, states = model.prefill(ids, model.make_cache(64), taps=(0, 2, -1))
    found = target.states(ids)
    torch.testing.assert_close(found[..., :-32], states, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(target.logits(found[0, -1:, -32:]), logits[0], atol=1e-5, rtol=1e-4)


def test_kept_states_are_those_of_each_batch(folder: Path) -> None:
    texts, target = some_texts(5), frozen(folder, taps=(1,))
    kept, own = (StatesOf(target, texts, keep=keep).batch([4, 1]) for keep in (True, False))
    for name in ("ids", "begins", "ends"):
        assert torch.equal(kept[name], own[name])
    for name in ("final", "tapped"):
        for row, end in enumerate(own["ends"].tolist()):
            torch.testing.assert_close(kept[name][row, :end], own[name][row, :end])


# --- draft models: trap 6, the first position of an answer ---


def test_a_draft_model_learns_from_the_answers_and_all_of_them(folder: Path) -> None:
    target = frozen(folder)
    learner = draft_model(folder, target, loss="kl")
    batch = StatesOf(target, some_texts(), keep=False).batch([0, 1, 2])
    grads: list[Tensor] = []
    learner.gpt.transformer.ln_f.register_full_backward_hook(lambda module, before, after: grads.append(after[0]))
    learner(batch).backward()
    reached = grads[0].abs().sum(-1) > 0
    for row, text in enumerate(some_texts()):
        # Position t is about token t + 1: the first that counts is the prompt's last.
        wanted = [text.start - 1 <= t < len(text.ids) for t in range(reached.size(1))]
        assert reached[row].tolist() == wanted


def test_the_loss_of_a_draft_model_is_that_of_whole_logits(folder: Path) -> None:
    target = frozen(folder)
    learner = draft_model(folder, target, loss="kl", temperature=0.7)
    texts = some_texts()
    loss = float(learner(StatesOf(target, texts, keep=False).batch([0, 1, 2])).detach())
    models = []
    for name in ("target", "draft"):
        checkpoint = open_checkpoint(folder / name)
        models.append(litgpt.model.GPT(checkpoint.config))
        models[-1].load_state_dict(read_state_dict(checkpoint))
    terms = []
    for text in texts:
        with torch.no_grad():
            log_p, log_q = (
                (model(text.ids.unsqueeze(0))[0, text.start - 1 :, :258] / 0.7).log_softmax(-1) for model in models
            )
        best = torch.nn.functional.cross_entropy(log_q, log_p.argmax(-1), reduction="none")
        terms.append((log_p.exp() * (log_p - log_q)).sum(-1) + 0.2 * best)
    assert loss == pytest.approx(float(torch.cat(terms).mean()), rel=1e-4)


def test_a_draft_that_is_its_target_is_always_accepted(folder: Path, tmp_path: Path) -> None:
    target, whole = frozen(folder), open_checkpoint(folder / "target")
    learner = DraftModel(
        whole.config, read_state_dict(whole), target, tokenizer_dir=whole.dir, dtype=torch.float32, k=4
    )
    found = learner.ratios(StatesOf(target, some_texts(), keep=False).batch([0, 1, 2]), Sampling(0.8, top_k=5))
    # A random text holds tokens that top-k leaves out; where the target can write them, so can the draft.
    assert all(set(c.unique().tolist()) <= {0.0, 1.0} for c in found)
    learner.save(tmp_path / "same")
    saved = read_state_dict(open_checkpoint(tmp_path / "same"))
    assert all(torch.equal(saved[name], w) for name, w in read_state_dict(whole).items())


def test_lora_trains_only_lora_and_is_merged_when_saved(folder: Path, tmp_path: Path) -> None:
    target = frozen(folder)
    learner = draft_model(folder, target, lora_r=2)
    batch = StatesOf(target, some_texts(), keep=False).batch([0, 1, 2])
    trained = {name: p for name, p in learner.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        before = learner(batch)
        before.backward()
        optimizer.step()
    learner.save(tmp_path / "merged")
    merged = open_checkpoint(tmp_path / "merged")
    model = litgpt.model.GPT(merged.config)
    model.load_state_dict(read_state_dict(merged))
    with torch.no_grad():
        ids = batch["ids"][:1]
        torch.testing.assert_close(model(ids), learner.head(learner.gpt(ids)), atol=1e-4, rtol=1e-4)
        base = litgpt.model.GPT(merged.config)
        base.load_state_dict(read_state_dict(open_checkpoint(folder / "draft")))
        assert not torch.allclose(model(ids), base(ids), atol=1e-4)


# --- block drafters: trap 5, blocks that see what decoding does not know; trap 6 ---


def test_a_block_sees_the_states_before_its_anchor_and_no_others(folder: Path) -> None:
    learner = block_drafter(folder)
    batch = StatesOf(learner._target, some_texts(2), keep=False).batch([0, 1])
    tapped = batch["tapped"].clone().requires_grad_()
    anchors = torch.tensor([[7, 9, 12], [8, 15, 9]])  # blocks of 4 rows: they overlap
    rows = learner.block_rows(batch["ids"], tapped, anchors)
    for text in range(2):
        for number, anchor in enumerate(anchors[text].tolist()):
            (grad,) = torch.autograd.grad(rows[text, number].square().sum(), tapped, retain_graph=True)
            seen = grad.abs().sum(-1) > 0
            assert seen[text].tolist() == [t < anchor for t in range(tapped.size(1))]
            assert not seen[1 - text].any()


def test_a_block_is_the_same_beside_other_blocks(folder: Path) -> None:
    learner = block_drafter(folder)
    batch = StatesOf(learner._target, some_texts(1), keep=False).batch([0])
    together = learner.block_rows(batch["ids"], batch["tapped"], torch.tensor([[9, 10, 11]]))
    alone = learner.block_rows(batch["ids"], batch["tapped"], torch.tensor([[10]]))
    torch.testing.assert_close(together[:, 1:2], alone)
    # It also does not depend on the tokens at its own positions.
    other = batch["ids"].clone()
    other[:, 11:] = 3
    torch.testing.assert_close(learner.block_rows(other, batch["tapped"], torch.tensor([[10]])), alone)


def test_a_block_drafter_is_taught_from_the_first_token_of_the_answer_on(folder: Path) -> None:
    learner = block_drafter(folder, anchors=64)
    text = some_texts(1)[0]
    batch = learner.random(StatesOf(learner._target, [text], keep=False).batch([0]), seed=0)
    found = sorted(a for a in batch["anchors"][0].tolist() if a >= 0)
    assert found == list(range(text.start, len(text.ids) - 1))
    loss = learner(batch)
    for t in range(len(text.ids)):
        final = batch["final"].clone()
        final[0, t] += 3 * torch.randn(final.size(-1), generator=torch.Generator().manual_seed(1))
        # The state at t teaches the token t + 1, drafted by blocks behind the answer's first token and later.
        assert (learner({**batch, "final": final}) != loss) == (t >= text.start)


def test_a_saved_block_drafter_drafts_what_it_was_measured_by(folder: Path, tmp_path: Path) -> None:
    learner = block_drafter(folder)
    learner.save(tmp_path / "dflash")
    llm = SpecLLM.load(folder / "target", tmp_path / "dflash", accelerator="cpu")
    assert llm.drafter is not None and llm.drafter.name == "dflash"
    learner.network.bfloat16().float()  # as it was saved
    text = some_texts(1)[0]
    batch = StatesOf(learner._target, [text], keep=False).batch([0])
    rows = learner.block_rows(batch["ids"], batch["tapped"], torch.tensor([[12]]))
    wanted = learner._target.logits(rows[0, 0, 1:])
    model = llm.placed.model
    drafting = llm.drafter.start(TargetSession(llm.placed, 64), 64, make_sampler(Sampling(0.0), seed=0))
    assert isinstance(drafting, DFlashSession)
    _, states = model.prefill(text.ids[None, :12], model.make_cache(64), taps=learner.taps)
    # The state of a token comes with the one behind it.
    drafting.commit(text.ids[:13].tolist(), 0, torch.cat((torch.zeros_like(states[0, :1]), states[0])))
    torch.testing.assert_close(drafting.logits(int(text.ids[12]), 12), wanted, atol=1e-4, rtol=1e-3)


# --- whole runs ---


def run(folder: Path, out: Path, **settings: Any) -> dict[str, Any]:
    return distill(
        folder / "prompts.txt",
        out,
        checkpoint_dir=folder / "target",
        **{"draft_dir": folder / "draft", **FAST, **settings},
    )


def test_a_run_learns_and_ends_in_a_folder_that_drafts(folder: Path, tmp_path: Path) -> None:
    summary = run(folder, tmp_path / "out", steps=60, evaluations=4, learning_rate=1e-2, loss="kl", temperature=0.5)
    assert summary["history"][-1]["loss"] < 0.8 * summary["history"][1]["loss"]
    assert summary["best"]["tokens_per_round"] > summary["start"]["tokens_per_round"]
    assert json.loads((tmp_path / "out" / "distill.json").read_text())["best"] == summary["best"]
    assert (tmp_path / "out" / "distill.png").read_bytes().startswith(b"\x89PNG")
    llm = SpecLLM.load(folder / "target", tmp_path / "out", accelerator="cpu")
    assert llm.generate("one", max_new_tokens=5, seed=1).stats.proposed > 0
    again = run(folder, tmp_path / "out", steps=60, evaluations=4, learning_rate=1e-2, loss="kl", temperature=0.5)
    assert again == json.loads(json.dumps(summary))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"from_layers": 1}, {"from_layers": 2, "lora_r": 2}, {"kind": "dflash", "draft_layers": 1, "block_size": 4}],
    ids=["from_layers", "lora", "dflash"],
)
def test_other_beginnings(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    summary = run(folder, tmp_path / "out", draft_dir=None, steps=3, evaluations=1, **settings)
    assert [entry["step"] for entry in summary["history"]] == [0, 3]
    assert summary["served"]["best"]["tokens_per_round"] >= 1


def test_a_new_model_from_a_config(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", tiny_config(n_layer=1, n_embd=16, n_head=2, n_query_groups=1, block_size=64))
    config = str(tmp_path / "other" / "model_config.yaml")
    run(folder, tmp_path / "out", draft_dir=None, draft_config=config, steps=2, evaluations=1)
    assert read_state_dict(open_checkpoint(tmp_path / "out"))["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.slow
def test_served_tokens_a_round_are_those_simulated_on_the_served_texts(folder: Path, tmp_path: Path) -> None:
    whole = open_checkpoint(folder / "target")
    noise = torch.Generator().manual_seed(0)
    noisy = {name: w + 0.02 * torch.randn(w.shape, generator=noise) for name, w in read_state_dict(whole).items()}
    write_checkpoint(tmp_path / "noisy", whole.config, weights=noisy)
    llm = SpecLLM.load(folder / "target", tmp_path / "noisy", accelerator="cpu")
    sampling = dict(temperature=0.6, top_k=20)
    done = llm.generate(PROMPTS, max_new_tokens=40, seed=0, speculative_k=3, **sampling)
    texts = []
    for completion in done:
        begin = llm.codec.encode(completion.prompt).long()
        if len(completion.token_ids) > 1 and completion.finish_reason == "length":
            texts.append(Text(torch.cat((begin, torch.tensor(completion.token_ids))), len(begin), {}))
    served = [c for c in done if len(c.token_ids) > 1 and c.finish_reason == "length"]
    target = frozen(folder)
    learner = DraftModel(whole.config, noisy, target, tokenizer_dir=whole.dir, dtype=torch.float32, k=3)
    states = StatesOf(target, texts, keep=False)
    found = expected_rounds(learner.ratios(states.batch(range(len(texts))), Sampling(**sampling)), 3)
    rounds = sum(c.stats.rounds for c in served)
    assert rounds > 200 and found.tokens == sum(len(c.token_ids) - 1 for c in served)
    # Four standard deviations of a count of rounds that vary by about one token each.
    assert found.rounds == pytest.approx(rounds, rel=4 / rounds**0.5)


def in_steps(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in summary["history"]]


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_like_an_undisturbed_one(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 150, "evaluations": 6, "learning_rate": 1e-2, "save_seconds": 0.0, **FAST}
    torch.set_num_threads(1)
    whole = run(folder, tmp_path / "whole", **settings)
    arguments = {
        "data": str(folder / "prompts.txt"),
        "out_dir": str(tmp_path / "killed"),
        "checkpoint_dir": str(folder / "target"),
        "draft_dir": str(folder / "draft"),
        **settings,
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training_child", "litspec.training.distillation"])
    moments, kills = random.Random(0), 0
    while kills < 10:
        process = context.Process(target=child, args=(arguments,))
        process.start()
        process.join(timeout=moments.uniform(0.1, 0.8))
        if process.exitcode is not None:
            assert process.exitcode == 0
            break
        process.kill()
        process.join()
        kills += 1
    killed = distill(**arguments)
    assert kills > 3
    assert in_steps(killed) == in_steps(whole)
    weights = [read_state_dict(open_checkpoint(tmp_path / name)) for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert killed["served"]["best"]["tokens_per_round"] == whole["served"]["best"]["tokens_per_round"]


@pytest.mark.slow
def test_an_early_end_keeps_the_best_state(folder: Path, tmp_path: Path) -> None:
    # With a learning rate that is too high, the initial state stays the best.
    summary = run(folder, tmp_path / "out", steps=40, evaluations=20, patience=2, learning_rate=0.5)
    assert summary["ended"].startswith("no gain") and summary["steps"] < 40
    kept = read_state_dict(open_checkpoint(tmp_path / "out"))
    best = summary["best"]["step"]
    if best == 0:
        start = read_state_dict(open_checkpoint(folder / "draft"))
        assert all(torch.equal(kept[name], w) for name, w in start.items())
    assert summary["best"]["tokens_per_round"] >= summary["history"][-1]["tokens_per_round"]


def test_a_loss_that_is_not_finite_ends_the_run_with_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"The loss is nan at step \d+; train with a learning_rate below"):
        run(folder, tmp_path / "out", steps=40, evaluations=1, learning_rate=1e30)
    kept = read_state_dict(open_checkpoint(tmp_path / "out"))
    assert all(w.isfinite().all() for w in kept.values())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"draft_dir": None}, "Training needs a starting point: give draft_dir"),
    ({"from_layers": 1}, "draft_dir and from_layers cannot be combined"),
    ({"kind": "dflash"}, "draft_dir and kind dflash cannot be combined"),
    ({"draft_dir": None, "from_layers": 3}, "below the target's 3 layers, got 3"),
    ({"draft_dir": None, "kind": "dflash", "lora_r": 2}, "lora_r is for draft models"),
    ({"draft_dir": None, "kind": "dflash", "measured_k": 8}, "measured_k must be below block_size"),
    ({"draft_dir": None, "draft_config": "nowhere.yaml"}, "is not a model_config.yaml"),
    ({"held_out": 1.0}, "held_out must be between 0 and 1"),
    ({"steps": 0}, "steps must be at least 1"),
    ({"minutes": float("nan")}, "minutes must be a number above 0"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_invalid_settings_are_refused(folder: Path, tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        run(folder, tmp_path / "out", **{"steps": 1, **settings})


def no_prompts(folder: Path, tmp: Path) -> dict[str, Any]:
    (tmp / "one.txt").write_text("only one")
    return {"data": tmp / "one.txt"}


def foreign_folder(folder: Path, tmp: Path) -> dict[str, Any]:
    (tmp / "out").mkdir()
    (tmp / "out" / "thesis.tex").write_text("do not lose")
    return {}


def the_draft_itself(folder: Path, tmp: Path) -> dict[str, Any]:
    return {"out_dir": folder / "draft"}


def other_tokenizer(folder: Path, tmp: Path) -> dict[str, Any]:
    config = tiny_config(n_layer=1, block_size=64)
    return {"draft_dir": write_checkpoint(tmp / "other", config, tokenizer=byte_level_tokenizer(words=("qq",)))}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (no_prompts, "holds 1 prompts; at least 2 are needed"),
        (foreign_folder, "holds 'thesis.tex', which was not written by this command"),
        (the_draft_itself, "is also draft_dir, which would be overwritten"),
        (other_tokenizer, "differ"),
        (lambda folder, tmp: {"data": tmp / "nothing"}, "does not exist; give a file of prompts"),
    ],
)
def test_folders_that_cannot_be_used_are_refused(
    folder: Path, tmp_path: Path, make: Callable[[Path, Path], dict[str, Any]], sentence: str
) -> None:
    given: dict[str, Any] = {"data": folder / "prompts.txt", "out_dir": tmp_path / "out", "draft_dir": folder / "draft"}
    given |= make(folder, tmp_path)
    with pytest.raises(InputError, match=sentence):
        distill(checkpoint_dir=folder / "target", steps=1, **given, **FAST)


def test_a_run_goes_on_only_with_its_own_settings(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out", steps=1, evaluations=1)
    with pytest.raises(InputError, match="holds a run with steps = 1, not 2; give the same settings"):
        run(folder, tmp_path / "out", steps=2, evaluations=1)


def test_given_answers_are_taken_as_they_are(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": prompt, "text": "an answer", "token_ids": [1, 2, 3, 4 + i]} for i, prompt in enumerate(PROMPTS)]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = distill(
        tmp_path / "given.jsonl",
        tmp_path / "out",
        checkpoint_dir=folder / "target",
        draft_dir=folder / "draft",
        steps=1,
        evaluations=1,
        **FAST,
    )
    assert summary["answer_tokens"] == 4 * summary["texts"]
    assert not (tmp_path / "out" / "training" / "answers.jsonl").exists()


def test_given_answers_may_stand_beside_prompts_and_are_not_measured_on(folder: Path, tmp_path: Path) -> None:
    given = [{"prompt": f"given {i}", "text": "some text"} for i in range(40)]
    lines = [*given[:20], {"prompt": "asked"}, *given[20:]]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"checkpoint_dir": folder / "target", "draft_dir": folder / "draft"}
    summary = distill(tmp_path / "mixed.jsonl", tmp_path / "out", steps=1, evaluations=1, **start, **FAST)
    assert (summary["texts"], summary["held_out_texts"]) == (40, 1)
    asked = (tmp_path / "out" / "training" / "served-prompts.jsonl").read_text()
    assert json.loads(asked) == {"prompt": "asked"}


@pytest.mark.slow
def test_the_clock_ends_a_run_that_has_minutes(folder: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    summary = run(folder, tmp_path / "out", minutes=1 / 60, evaluations=2)
    assert summary["ended"] == "the time is up" and summary["seconds"] >= 1
    assert time.monotonic() - began < 30
