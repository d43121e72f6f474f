"""Every drafter under every sampler leaves the text to the target, and its drafts are what a fresh one would draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import litgpt.model
import pytest
import torch
from host_reads import HostReads
from laws import chi_square, follows
from litgpt import Config

from litspec import rounds
from litspec.checkpoint import PairReport
from litspec.engine.sequence import Block, decode
from litspec.drafters import (
    Drafter,
    DraftModel,
    DraftSession,
    EarlyExit,
    PromptLookup,
    Proposal,
    make_drafter,
    make_speculative_k,
)
from litspec.errors import InputError
from litspec.model import GPT
from litspec.placement import Single
from litspec.rounds import Rounds, TargetSession
from litspec.sampling import Sampling, make_sampler
from litspec.stopping import StopTokens
from litspec.testing import check_drafter

VOCAB = 64
PROMPT = [5, 9, 9, 7, 5, 9, 9, 7, 21, 5]
GREEDY = Sampling(temperature=0)
COUPLED = Sampling(temperature=0.8, top_k=20, sampler="coupled")
REJECTION = Sampling(temperature=0.9)
NAMES = ["draft_model", "prompt_lookup", "early_exit"]


def gpt(seed: int = 0, n_layer: int = 2, vocab: int = VOCAB, block_size: int = 512) -> GPT:
    """A random Llama, whose logits are wide enough for text that does not repeat itself at once."""
    config = Config(
        block_size=block_size,
        n_layer=n_layer,
        n_embd=32,
        n_head=4,
        n_query_groups=2,
        vocab_size=vocab,
        padded_vocab_size=vocab,
        rotary_percentage=1.0,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=48,
        bias=False,
        parallel_residual=False,
    )
    model = GPT(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            scale = 1.0 if "wte" in name else 0.4
            p.copy_(scale * torch.randn(p.shape, generator=generator))
    return model


def disturbed(model: GPT, noise: float = 0.03) -> GPT:
    """A draft that agrees with the model now and then."""
    other = GPT(model.config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    other.load_state_dict(
        {name: p + noise * torch.randn(p.shape, generator=generator) for name, p in model.state_dict().items()}
    )
    return other


TARGET = gpt()
DRAFT = disturbed(TARGET)


def place(model: GPT = TARGET, draft: GPT | None = DRAFT, width: int = 8) -> Single:
    return Single(model=model, draft_model=draft, device=torch.device("cpu"), verify_width=width)


class Reckless:
    """Proposes whatever, behind stops too, and nothing at times."""

    taps = ()
    max_k = 7
    step_bytes = 1

    def begin(self, target: TargetSession, max_length: int, sampler: Any) -> DraftSession:
        rng = random.Random(0)
        session = SimpleNamespace(extend=lambda *args: None)
        session.propose = lambda token, input_pos, k: Proposal(
            torch.tensor([rng.randrange(VOCAB) for _ in range(rng.randint(0, k))], dtype=torch.int64)
        )
        return session


def complete(
    drafter: Drafter | str,
    sampling: Sampling,
    *,
    k: int | str = 4,
    new: int = 40,
    stops: Sequence[Sequence[int]] = (),
    seed: int = 2**40 + 77,
    prompt: Sequence[int] = PROMPT,
    placed: Single | None = None,
    target: TargetSession | None = None,
    min_new: int = 0,
) -> list[Block]:
    placed = placed or place()
    drafter = make_drafter(drafter, placed)
    length = len(prompt) + new
    stop_ids = [stop[0] for stop in stops if len(stop) == 1]
    target = target or TargetSession(placed, length, stop_ids)
    sampler = make_sampler(sampling, seed=seed, banned=stop_ids, banned_until=len(prompt) + min_new if min_new else 0)
    draft = drafter.begin(target, length, sampler) if drafter is not None else None
    text = Rounds(target, draft, sampler, make_speculative_k(k, placed, drafter, sampling))
    return list(
        decode(
            lambda: text.prefill(prompt),
            text.step,
            prompt_size=len(prompt),
            max_returned_tokens=length,
            speculative_k=lambda: text.speculative_k,
            stop=StopTokens(stops, ignore_first=min_new),
        )
    )


def tokens_of(blocks: list[Block]) -> list[int]:
    return [token for block in blocks for token in block.tokens]


def proposed_and_accepted(blocks: list[Block]) -> tuple[int, int]:
    return sum(block.proposed for block in blocks), sum(block.accepted for block in blocks)


def argmax_alone(model: GPT, prompt: Sequence[int], new: int, n_layer: int | None = None) -> list[int]:
    """LitGPT's own model without a cache, a whole forward for each token."""
    config = model.config
    other = litgpt.model.GPT(config).eval()
    other.load_state_dict(model.state_dict())
    if n_layer is not None:
        other.transformer.h = other.transformer.h[:n_layer]
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            tokens.append(int(other(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


# --- the text is the target's own -------------------------------------------------------------------------------------


def test_greedy_text_is_that_of_litgpt_s_model_alone():
    alone = argmax_alone(TARGET, PROMPT, 40)
    assert len(set(alone)) > 10, "a text that says nothing"
    for drafter in ["none", *NAMES, Reckless()]:
        assert tokens_of(complete(drafter, GREEDY)) == alone


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("drafter", [*NAMES, Reckless()], ids=[*NAMES, "reckless"])
def test_no_drafter_no_k_and_no_budget_changes_the_text(drafter, sampling):
    plain = tokens_of(complete("none", sampling, new=40))
    for k in (1, 3, 7, "auto"):
        assert tokens_of(complete(drafter, sampling, k=k, new=40)) == plain
    for new in (1, 2, 3, 8):
        assert tokens_of(complete(drafter, sampling, new=new)) == plain[:new]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("drafter", [*NAMES, Reckless()], ids=[*NAMES, "reckless"])
def test_a_stop_ends_the_text_where_the_target_alone_ends_it(drafter, sampling):
    plain = tokens_of(complete("none", sampling, new=40))
    for at in (0, 1, 2, 5, 12):
        for stop in ([plain[at]], plain[at : at + 2]):
            first = next(i for i in range(40) if plain[i : i + len(stop)] == stop)
            for k in (2, 7):
                blocks = complete(drafter, sampling, k=k, new=40, stops=[stop])
                assert tokens_of(blocks) == plain[:first]
                assert blocks[-1].finish_reason == "stop"


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("drafter", NAMES)
def test_a_stop_that_is_banned_at_first_does_not_come_too_early(drafter, sampling):
    stop = tokens_of(complete("none", sampling, new=40))[3]
    blocks = complete(drafter, sampling, stops=[[stop]], min_new=20, new=40)
    assert len(tokens_of(blocks)) >= 20 and stop not in tokens_of(blocks)
    if sampling is not REJECTION:
        assert tokens_of(blocks) == tokens_of(complete("none", sampling, stops=[[stop]], min_new=20, new=40))


@pytest.mark.parametrize("drafter", NAMES)
def test_rejection_texts_follow_the_target_s_law(drafter):
    model = gpt(seed=4, vocab=5)
    placed = place(model, disturbed(model, 0.1))
    prompt = [1, 2, 4, 1, 2]
    target = TargetSession(placed, len(prompt) + 3)
    blocks = [
        complete(drafter, REJECTION, k=2, new=3, prompt=prompt, placed=placed, target=target, seed=seed)
        for seed in range(800)
    ]
    proposed, accepted = proposed_and_accepted([block for text in blocks for block in text])
    assert 0 < accepted < proposed, "a case that proves nothing"
    law = torch.zeros(5, 5, 5)
    reference = litgpt.model.GPT(model.config).eval()
    reference.load_state_dict(model.state_dict())
    with torch.inference_mode():
        for a in range(5):
            for b in range(5):
                probs = (reference(torch.tensor([[*prompt, a, b]]))[0, -3:] / REJECTION.temperature).softmax(-1)
                law[a, b] = probs[0, a] * probs[1, b] * probs[2]
    assert follows(torch.tensor([tokens_of(text) for text in blocks]), law)


@pytest.mark.parametrize("drafter", NAMES)
def test_a_seed_gives_one_rejection_text_whatever_the_clock_says(drafter, monkeypatch):
    clock = random.Random(0)
    for k in (3, "auto"):
        first = tokens_of(complete(drafter, REJECTION, k=k))
        monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: clock.uniform(0, 1e3)))
        assert tokens_of(complete(drafter, REJECTION, k=k)) == first
        monkeypatch.undo()
        assert tokens_of(complete(drafter, REJECTION, k=k, seed=8)) != first


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
def test_the_same_model_as_target_and_draft_accepts_everything(sampling):
    for k in (1, 4, 7):
        proposed, accepted = proposed_and_accepted(complete("draft_model", sampling, k=k, placed=place(draft=TARGET)))
        assert accepted == proposed > 0


@pytest.mark.parametrize("k", [1, 4, 7])
def test_early_exit_after_the_last_layer_accepts_everything(k):
    for seed in range(4):
        placed = place(gpt(seed, n_layer=3))
        drafter = make_drafter("early_exit", placed, exit_layer=3)
        proposed, accepted = proposed_and_accepted(complete(drafter, GREEDY, k=k, placed=placed, new=100))
        assert accepted == proposed > 0


# --- the drafts themselves --------------------------------------------------------------------------------------------


class Script:
    """One text in which any part of a proposal is accepted, as a script has it."""

    def __init__(self, drafter: Drafter, sampling: Sampling, tokens: Sequence[int], *, seed: int = 2**40) -> None:
        self.tokens = list(tokens)
        self.target = TargetSession(place(), 300)
        self.session = drafter.begin(self.target, 300, make_sampler(sampling, seed=seed))
        with torch.inference_mode():
            self.target.prefill(self.tokens[:-1])
        self.session.extend(self.tokens[:-1], 0)
        self.session.extend(self.tokens[-1:], len(self.tokens) - 1)

    def propose(self, k: int) -> Proposal:
        return self.session.propose(self.tokens[-1], len(self.tokens) - 1, k)

    def commit(self, proposal: Proposal, accepted: int, own: int) -> None:
        position = len(self.tokens)
        with torch.inference_mode():
            self.target.verify(self.tokens[-1], position - 1, proposal.tokens)
        committed = [*proposal.tokens[:accepted].tolist(), own]
        self.tokens += committed
        self.session.extend(committed, position)

    def play(self, rng: random.Random, number: int) -> None:
        """Rounds of any k, none among them, of which any part is accepted."""
        for _ in range(number):
            k = rng.choice([0, 0, 1, 2, 5, 7])
            proposal = self.propose(k) if k else Proposal(torch.empty(0, dtype=torch.int64))
            m = len(proposal.tokens)
            self.commit(proposal, rng.choice([0, m, rng.randint(0, m)]), rng.randrange(VOCAB))


def drafters() -> dict[str, Drafter]:
    placed = place()
    return {name: make_drafter(name, placed) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_after_any_rounds_the_drafts_are_those_of_a_fresh_session(name, sampling):
    drafter, rng = drafters()[name], random.Random(3)
    for _ in range(4):
        script = Script(drafter, sampling, PROMPT[: rng.randint(2, 10)])
        for _ in range(6):
            script.play(rng, 3)
            fresh = Script(drafter, sampling, script.tokens)
            for _ in range(2):  # and asked twice it says the same
                assert script.propose(7).tokens.tolist() == fresh.propose(7).tokens.tolist()


@pytest.mark.parametrize("name", ["draft_model", "early_exit"])
def test_after_any_rounds_the_reported_distribution_is_that_of_a_fresh_session(name):
    drafter, rng = drafters()[name], random.Random(4)
    script = Script(drafter, REJECTION, PROMPT)
    for _ in range(8):
        script.play(rng, 3)
        fresh = Script(drafter, REJECTION, script.tokens)
        torch.testing.assert_close(script.propose(1).q.probs, fresh.propose(1).q.probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "model", "n_layer"), [("draft_model", DRAFT, None), ("early_exit", TARGET, 1)])
def test_greedy_drafts_are_what_litgpt_s_model_says(name, model, n_layer):
    drafter, rng = drafters()[name], random.Random(5)
    script = Script(drafter, GREEDY, PROMPT)
    for _ in range(5):
        script.play(rng, 3)
        assert script.propose(7).tokens.tolist() == argmax_alone(model, script.tokens, 7, n_layer)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("draft_model", Sampling(temperature=1.3, top_k=30, top_p=0.9)), ("early_exit", REJECTION)],
    ids=["draft_model", "early_exit"],
)
def test_tokens_are_drawn_from_the_distribution_that_is_reported(name, sampling):
    script = Script(drafters()[name], sampling, PROMPT)
    drawn = [script.propose(1) for _ in range(4096)]
    q = drawn[0].q
    law = torch.zeros(VOCAB)
    law[torch.arange(VOCAB) if q.ids is None else q.ids[0]] = q.probs[0]
    assert law.sum() == pytest.approx(1)
    assert chi_square(torch.cat([proposal.tokens for proposal in drawn]), law) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_our_drafters_keep_the_promises_that_anybody_s_must(name):
    check_drafter(drafters()[name], SimpleNamespace(placed=place(), verify_width=8), rounds=4, draws=300)


@pytest.mark.parametrize("name", NAMES)
def test_two_open_texts_and_an_abandoned_one_do_not_disturb_each_other(name):
    drafter = drafters()[name]
    alone = []
    for i in (0, 1):
        script = Script(drafter, GREEDY, PROMPT[i:])
        script.play(random.Random(i), 9)
        alone.append((script.tokens, script.propose(7).tokens.tolist()))
    scripts = [Script(drafter, GREEDY, PROMPT[i:]) for i in (0, 1)]
    Script(drafter, GREEDY, PROMPT[:3]).propose(4)
    rngs = [random.Random(0), random.Random(1)]
    for _ in range(9):
        for script, rng in zip(scripts, rngs):
            script.play(rng, 1)
    assert [(script.tokens, script.propose(7).tokens.tolist()) for script in scripts] == alone


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION, Sampling(top_k=9, top_p=0.7)])
@pytest.mark.parametrize("name", ["draft_model", "early_exit"])
def test_proposing_reads_nothing_to_the_host(name, sampling):
    script = Script(drafters()[name], sampling, PROMPT)
    with torch.inference_mode(), HostReads() as reads:
        script.propose(5)
        script.propose(5)
    assert reads.seen == []


# --- the draft model --------------------------------------------------------------------------------------------------


class Forwards:
    """Counts the forwards of a model, and the rows that prefills read."""

    def __init__(self, model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verify = self.prefill = self.prefilled = 0
        verify, prefill = model.verify, model.prefill

        def counted_verify(*args: Any, **kwargs: Any) -> Any:
            self.verify += 1
            return verify(*args, **kwargs)

        def counted_prefill(idx: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.prefill += 1
            self.prefilled += idx.size(1)
            return prefill(idx, *args, **kwargs)

        monkeypatch.setattr(model, "verify", counted_verify)
        monkeypatch.setattr(model, "prefill", counted_prefill)

    @property
    def all(self) -> int:
        return self.verify + self.prefill


def test_a_round_costs_k_forwards_however_it_ends(monkeypatch):
    script = Script(drafters()["draft_model"], GREEDY, PROMPT)
    forwards = Forwards(DRAFT, monkeypatch)
    rng = random.Random(0)
    first = True
    for k, accepted in ((4, 4), (4, 4), (3, 0), (7, 7), (1, 1), (1, 0), (5, 2), (5, 5), (2, 2)):
        before = forwards.all
        script.commit(script.propose(k), accepted, rng.randrange(VOCAB))
        assert forwards.all - before == k + first, "the first one reads the prompt"
        first = False
    assert forwards.prefill == 1, "what was accepted is not read again"


def test_nothing_runs_before_a_proposal_is_asked_for_and_then_the_rest_is_read_at_once(monkeypatch):
    forwards = Forwards(DRAFT, monkeypatch)
    script = Script(drafters()["draft_model"], GREEDY, PROMPT)
    nothing = Proposal(torch.empty(0, dtype=torch.int64))
    for token in range(12):
        script.commit(nothing, 0, token)
    assert forwards.all == 0
    script.commit(script.propose(3), 1, 3)
    assert (forwards.prefill, forwards.verify) == (2, 2), "the prompt; the rest with the first draft; two more drafts"
    for token in range(12):
        script.commit(nothing, 0, token)
    script.propose(3)
    assert (forwards.prefill, forwards.verify) == (3, 4)


def test_the_first_token_does_not_wait_for_the_draft(monkeypatch):
    forwards = Forwards(DRAFT, monkeypatch)
    placed = place()
    drafter = make_drafter("draft_model", placed)
    target, sampler = TargetSession(placed, 30), make_sampler(GREEDY, seed=0)
    text = Rounds(target, drafter.begin(target, 30, sampler), sampler, make_speculative_k(2, placed, drafter, GREEDY))
    token = text.prefill(PROMPT)
    assert forwards.all == 0
    text.step(token, len(PROMPT), 2)
    assert forwards.all == 3


def test_the_next_text_need_not_read_the_same_prompt_again(monkeypatch):
    prompt = [(7 * i) % VOCAB for i in range(300)]
    forwards = Forwards(DRAFT, monkeypatch)
    drafter = drafters()["draft_model"]

    def propose(drafter: Drafter, tokens: list[int]) -> Proposal:
        session = drafter.begin(TargetSession(place(), 512), 512, make_sampler(COUPLED, seed=2**40))
        session.extend(tokens, 0)
        session.extend([3], len(tokens))
        proposal = session.propose(3, len(tokens), 5)
        session.close()
        return proposal

    propose(drafter, prompt)
    assert forwards.prefilled == 299
    again = propose(drafter, prompt)
    assert forwards.prefilled == 299
    other = propose(drafter, prompt[:100])
    assert forwards.prefilled == 299 + 99
    for proposal, tokens in ((again, prompt), (other, prompt[:100])):
        fresh = propose(drafters()["draft_model"], tokens)
        assert proposal.tokens.tolist() == fresh.tokens.tolist()


def test_a_beginning_that_prompts_share_is_kept_up_to_a_border_between_chunks(monkeypatch):
    model = gpt(2, n_layer=1, block_size=2048)
    forwards = Forwards(model, monkeypatch)
    prompt = [(7 * i) % VOCAB for i in range(1200)]
    laws = []
    for reuse in (True, False):
        drafter = DraftModel(model, target_config=TARGET.config, max_k=7)
        for tokens in [prompt, [*prompt[:1100], 1, 2, 3]] if reuse else [[*prompt[:1100], 1, 2, 3]]:
            before = forwards.prefilled
            session = drafter.begin(TargetSession(place(), 64), 1400, make_sampler(REJECTION, seed=1))
            session.extend(tokens, 0)
            session.extend([3], len(tokens))
            proposal = session.propose(3, len(tokens), 3)
            session.close()
        read = forwards.prefilled - before
        assert read == (1102 - 1024 if reuse else 1102)
        laws.append(proposal.q.probs)
    assert torch.equal(*laws), "a text's drafts must not depend on what was drafted before"


def test_ids_that_mean_something_else_are_never_proposed_whatever_the_paddings():
    for draft_vocab in (48, 96):
        placed = place(draft=gpt(3, vocab=draft_vocab))
        pair = PairReport(shared_vocab_size=40, excluded=(2, 5, 39))
        drafter = make_drafter("draft_model", placed, pair=pair)
        for sampling in (GREEDY, COUPLED, Sampling(temperature=50.0), Sampling(temperature=50.0, top_k=50)):
            target = TargetSession(placed, 300)
            session = drafter.begin(target, 300, make_sampler(sampling, seed=2**40))
            session.extend(PROMPT, 0)
            for _ in range(20):
                tokens, q = session.propose(PROMPT[-1], len(PROMPT) - 1, 7)
                assert all(token < 40 and token not in pair.excluded for token in tokens.tolist())
            if sampling.sampler == "rejection" and not sampling.greedy:
                dense = q.probs if q.ids is None else torch.zeros(7, VOCAB).scatter(1, q.ids, q.probs)
                assert dense.shape == (7, VOCAB)
                assert dense[:, 40:].sum() == 0 and dense[:, pair.excluded].sum() == 0
                torch.testing.assert_close(dense.sum(1), torch.ones(7))


@pytest.mark.parametrize("draft_vocab", [48, 96])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_other_paddings_change_no_text(draft_vocab, sampling):
    placed = place(draft=gpt(3, vocab=draft_vocab))
    assert tokens_of(complete("draft_model", sampling, placed=placed)) == tokens_of(complete("none", sampling))
    complete("draft_model", REJECTION, placed=placed)


def test_beyond_the_draft_s_context_nothing_is_proposed_and_that_is_said():
    placed = place(draft=gpt(3, block_size=24))
    drafter = make_drafter("draft_model", placed)
    assert len(drafter.notes) == 1 and "24 tokens" in drafter.notes[0] and "512" in drafter.notes[0]
    blocks = complete(drafter, GREEDY, placed=placed, new=40)
    assert tokens_of(blocks) == tokens_of(complete("none", GREEDY, new=40))
    at = len(PROMPT)
    for block in blocks[1:]:
        at += len(block.tokens)
        assert block.proposed <= max(24 - (at - len(block.tokens)) + 1, 0)
    assert blocks[-1].proposed == blocks[-2].proposed == 0
    assert make_drafter("draft_model", place()).notes == []


def test_a_draft_in_another_precision_leaves_the_text_alone():
    placed = place(draft=disturbed(TARGET, 0.001).bfloat16())
    for sampling in (GREEDY, COUPLED):
        blocks = complete("draft_model", sampling, placed=placed)
        assert tokens_of(blocks) == tokens_of(complete("none", sampling))
        proposed, accepted = proposed_and_accepted(blocks)
        assert accepted > proposed / 2


# --- choosing a drafter -----------------------------------------------------------------------------------------------


def test_auto_is_the_draft_model_where_there_is_one_else_prompt_lookup():
    assert isinstance(make_drafter("auto", place()), DraftModel)
    assert isinstance(make_drafter("auto", place(draft=None)), PromptLookup)
    assert make_drafter("none", place()) is None


def test_early_exit_takes_a_quarter_of_the_layers_unless_told():
    assert [make_drafter("early_exit", place(gpt(n_layer=n))).exit_layer for n in (1, 3, 4, 9)] == [1, 1, 1, 2]
    drafter = make_drafter("early_exit", place(), exit_layer=2)
    assert isinstance(drafter, EarlyExit) and drafter.exit_layer == 2


def test_an_object_of_the_protocol_is_taken_as_it_is():
    drafter = Reckless()
    assert make_drafter(drafter, place()) is drafter


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"drafter": "ngram"}, "drafter must be one of auto, .*, got 'ngram'"),
        ({"drafter": object()}, "object lacks taps, max_k, step_bytes, begin"),
        ({"drafter": "draft_model"}, "draft_dir is not given"),
        ({"drafter": "early_exit", "exit_layer": 3}, "between 1 and the target's 2 layers, got 3"),
        ({"drafter": "early_exit", "exit_layer": 0}, "between 1 and the target's 2 layers, got 0"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_sentence(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        make_drafter(placed=place(draft=None), **settings)
