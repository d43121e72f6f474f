"""With every drafter and sampler the text is the target's, and drafts are those of a new session."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import (
    COUPLED,
    DRAFT,
    GREEDY,
    PROMPT,
    REJECTION,
    TARGET,
    VOCAB,
    complete,
    disturbed,
    gpt,
    litgpt_model,
    place,
    proposed_and_accepted,
    request,
    tokens_of,
)
from host_reads import HostReads
from laws import chi_square, follows

from litspec.checkpoint import PairReport
from litspec.drafters import (
    Cost,
    Drafter,
    DraftModel,
    DraftSession,
    EarlyExit,
    LookupThenModel,
    PromptLookup,
    Proposal,
    make_drafter,
)
from litspec.engine import speculate
from litspec.engine.engine import Engine
from litspec.engine.target import TargetSession
from litspec.errors import InputError
from litspec.model import GPT
from litspec.sampling import Distribution, Sampling, make_sampler
from litspec.testing import check_drafter

NAMES = ["draft_model", "prompt_lookup", "early_exit", "lookup_then_model"]


class Toy(Drafter):
    """A drafter made of a function from (token, input_pos, k) to a proposal."""

    def __init__(self, propose: Any, name: str = "Toy") -> None:
        self._propose = propose
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def start(self, target: TargetSession, max_length: int, sampler: Any) -> DraftSession:
        return ToySession(self._propose)


class ToySession(DraftSession):
    def __init__(self, propose: Any) -> None:
        self._propose = propose

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        return self._propose(token, input_pos, k)


class Reckless(Drafter):
    """Proposes random tokens, also after stops, and sometimes nothing."""

    def start(self, target: TargetSession, max_length: int, sampler: Any) -> DraftSession:
        rng = random.Random(0)
        return ToySession(
            lambda token, input_pos, k: Proposal(
                torch.tensor([rng.randrange(VOCAB) for _ in range(rng.randint(0, k))], dtype=torch.int64)
            )
        )


def argmax_alone(model: GPT, prompt: Sequence[int], new: int, n_layer: int | None = None) -> list[int]:
    """LitGPT's own model without a cache, a whole forward for each token."""
    other = litgpt_model(model, n_layer)
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("drafter", NAMES)
def test_a_stop_that_is_banned_at_first_does_not_come_too_early(drafter, sampling):
    stop = tokens_of(complete("none", sampling, new=40))[3]
    blocks = complete(drafter, sampling, stops=[[stop]], min_new=20, new=40)
    assert len(tokens_of(blocks)) >= 20 and stop not in tokens_of(blocks)
    if sampling is not REJECTION:
        assert tokens_of(blocks) == tokens_of(complete("none", sampling, stops=[[stop]], min_new=20, new=40))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", NAMES)
def test_rejection_texts_follow_the_target_s_law(drafter):
    model = gpt(seed=4, vocab=5)
    placed = place(model, disturbed(model, 0.1))
    prompt = [1, 2, 4, 1, 2]
    engine = Engine(placed, make_drafter(drafter, placed), max_length=len(prompt) + 3)
    blocks = [complete(drafter, REJECTION, k=2, new=3, prompt=prompt, engine=engine, seed=seed) for seed in range(800)]
    proposed, accepted = proposed_and_accepted([block for text in blocks for block in text])
    assert 0 < accepted < proposed, "a case that proves nothing"
    law = torch.zeros(5, 5, 5)
    reference = litgpt_model(model)
    with torch.inference_mode():
        for a in range(5):
            for b in range(5):
                probs = (reference(torch.tensor([[*prompt, a, b]]))[0, -3:] / REJECTION.temperature).softmax(-1)
                law[a, b] = probs[0, a] * probs[1, b] * probs[2]
    assert follows(torch.tensor([tokens_of(text) for text in blocks]), law)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", NAMES)
def test_a_seed_gives_one_rejection_text_whatever_the_clock_says(drafter, monkeypatch):
    clock = random.Random(0)
    for k in (3, "auto"):
        first = tokens_of(complete(drafter, REJECTION, k=k))
        monkeypatch.setattr(speculate, "time", SimpleNamespace(perf_counter=lambda: clock.uniform(0, 1e3)))
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
    """One text in which a scripted number of proposals is accepted."""

    def __init__(self, drafter: Drafter, sampling: Sampling, tokens: Sequence[int], *, seed: int = 2**40) -> None:
        self.tokens = list(tokens)
        self.target = TargetSession(place(), 300)
        self.sampler = make_sampler(sampling, seed=seed)
        self.session = drafter.start(self.target, 300, self.sampler)
        with torch.inference_mode():
            self.target.prefill(self.tokens[:-1])
        self.session.commit(self.tokens[:-1], 0)
        self.session.commit(self.tokens[-1:], len(self.tokens) - 1)

    def propose(self, k: int) -> Proposal:
        return self.session.propose(self.tokens[-1], len(self.tokens) - 1, k)

    def commit(self, proposal: Proposal, accepted: int, own: int) -> None:
        position = len(self.tokens)
        with torch.inference_mode():
            self.target.verify(self.tokens[-1], position - 1, proposal.tokens)
        committed = [*proposal.tokens[:accepted].tolist(), own]
        self.tokens += committed
        self.session.commit(committed, position)

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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_after_any_rounds_the_drafts_are_those_of_a_fresh_session(name, sampling):
    drafter, rng = drafters()[name], random.Random(3)
    for _ in range(4):
        script = Script(drafter, sampling, PROMPT[: rng.randint(2, 10)])
        for _ in range(6):
            script.play(rng, 3)
            fresh = Script(drafter, sampling, script.tokens)
            for _ in range(2):  # a repeated call gives the same proposal
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sampling"),
    [("draft_model", Sampling(temperature=1.3, top_k=30, top_p=0.9)), ("early_exit", REJECTION)],
    ids=["draft_model", "early_exit"],
)
def test_tokens_are_drawn_from_the_distribution_that_is_reported(name, sampling):
    script = Script(drafters()[name], sampling, PROMPT)
    drawn = []
    for seed in range(4096):
        script.sampler.set_seed(seed)  # one seed has one token at one position
        drawn.append(script.propose(1))
    q = drawn[0].q
    law = torch.zeros(VOCAB)
    law[torch.arange(VOCAB) if q.ids is None else q.ids[0]] = q.probs[0]
    assert law.sum() == pytest.approx(1)
    assert chi_square(torch.cat([proposal.tokens for proposal in drawn]), law) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_our_drafters_follow_the_drafter_protocol(name):
    check_drafter(drafters()[name], SimpleNamespace(placed=place(), verify_width=8), rounds=4, draws=300)


@pytest.mark.parametrize("name", NAMES)
def test_two_open_texts_and_a_cancelled_one_do_not_affect_each_other(name):
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
@pytest.mark.parametrize("name", ["draft_model", "early_exit", "lookup_then_model"])
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


def test_nothing_runs_before_a_proposal_is_requested_and_then_the_rest_is_read_at_once(monkeypatch):
    forwards = Forwards(DRAFT, monkeypatch)
    script = Script(drafters()["draft_model"], GREEDY, PROMPT)
    nothing = Proposal(torch.empty(0, dtype=torch.int64))
    for token in range(12):
        script.commit(nothing, 0, token)
    assert forwards.all == 0
    script.commit(script.propose(3), 1, 3)
    assert (forwards.prefill, forwards.verify) == (2, 3), "the prompt, then the rest; three drafts"
    for token in range(12):
        script.commit(nothing, 0, token)
    script.propose(3)
    assert (forwards.prefill, forwards.verify) == (3, 6)


def test_the_first_token_does_not_wait_for_the_draft(monkeypatch):
    forwards = Forwards(DRAFT, monkeypatch)
    placed = place()
    drafter = make_drafter("draft_model", placed)
    engine = Engine(placed, drafter, max_length=30)
    engine.add(request(placed, drafter, GREEDY, k=2, new=20))
    engine.step()
    assert forwards.all == 0
    engine.step()
    assert forwards.all == 3


def test_the_next_text_need_not_read_the_same_prompt_again(monkeypatch):
    prompt = [(7 * i) % VOCAB for i in range(300)]
    forwards = Forwards(DRAFT, monkeypatch)
    drafter = drafters()["draft_model"]
    target = TargetSession(place(), 512)

    def propose(drafter: Drafter, tokens: list[int]) -> Proposal:
        session = drafter.start(target, 512, make_sampler(COUPLED, seed=2**40))
        session.commit(tokens, 0)
        session.commit([3], len(tokens))
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


def test_a_prefix_that_prompts_share_is_reused_in_whole_chunks(monkeypatch):
    model = gpt(2, n_layer=1, block_size=2048)
    forwards = Forwards(model, monkeypatch)
    prompt = [(7 * i) % VOCAB for i in range(1200)]
    laws = []
    placed = place(gpt(block_size=2048))
    for reuse in (True, False):
        drafter, target = DraftModel(model, target_config=TARGET.config, max_k=7), TargetSession(placed, 1400)
        for tokens in [prompt, [*prompt[:1100], 1, 2, 3]] if reuse else [[*prompt[:1100], 1, 2, 3]]:
            before = forwards.prefilled
            session = drafter.start(target, 1400, make_sampler(REJECTION, seed=1))
            session.commit(tokens, 0)
            session.commit([3], len(tokens))
            proposal = session.propose(3, len(tokens), 3)
            session.close()
        read = forwards.prefilled - before
        assert read == (1102 - 1024 if reuse else 1102)
        laws.append(proposal.q.probs)
    assert torch.equal(*laws), "a text's drafts must not depend on what was drafted before"


def test_ids_that_differ_are_never_proposed_for_any_padding():
    for draft_vocab in (48, 96):
        placed = place(draft=gpt(3, vocab=draft_vocab))
        pair = PairReport(shared_vocab_size=40, excluded=(2, 5, 39))
        drafter = make_drafter("draft_model", placed, pair=pair)
        for sampling in (GREEDY, COUPLED, Sampling(temperature=50.0), Sampling(temperature=50.0, top_k=50)):
            target = TargetSession(placed, 300)
            session = drafter.start(target, 300, make_sampler(sampling, seed=2**40))
            session.commit(PROMPT, 0)
            for _ in range(20):
                tokens, q = session.propose(PROMPT[-1], len(PROMPT) - 1, 7)
                assert all(token < 40 and token not in pair.excluded for token in tokens.tolist())
            if sampling.sampler == "rejection" and not sampling.greedy:
                dense = q.at(Distribution(torch.empty(7, VOCAB)))
                assert dense[:, 40:].sum() == 0 and dense[:, pair.excluded].sum() == 0
                torch.testing.assert_close(dense.sum(1), torch.ones(7))


@pytest.mark.parametrize("draft_vocab", [48, 96])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_other_paddings_change_no_text(draft_vocab, sampling):
    placed = place(draft=gpt(3, vocab=draft_vocab))
    assert tokens_of(complete("draft_model", sampling, placed=placed)) == tokens_of(complete("none", sampling))
    complete("draft_model", REJECTION, placed=placed)


def test_after_the_draft_s_context_nothing_is_proposed_and_a_note_reports_it():
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


# --- a model where the text has nothing to say ---------------------------------------------------------------------


@pytest.mark.slow
def test_lookup_then_model_uses_the_model_without_an_earlier_trigram():
    rng = random.Random(7)
    looked_up = 0
    for _ in range(40):
        # Few different tokens, so that some n-grams repeat.
        tokens = [rng.randrange(3) for _ in range(rng.randint(4, 12))]
        last = tokens[-3:]
        ends = [e for e in range(3, len(tokens)) if tokens[e - 3 : e] == last]
        proposal = Script(drafters()["lookup_then_model"], GREEDY, tokens).propose(4)
        if ends:
            looked_up += 1
            assert proposal.tokens.tolist()[:1] in [tokens[e : e + 1] for e in ends]
        else:
            assert proposal.tokens.tolist() == argmax_alone(DRAFT, tokens, 4)
    assert 5 < looked_up < 35, "a case that proves nothing"


def test_lookup_then_model_delegates_to_the_model(monkeypatch):
    class Watched(Reckless):
        taps, max_k, notes = (1,), 5, ["Watch it."]

        def __init__(self):
            self.calls = []

        def start(self, *args):
            session = super().start(*args)
            for name in ("commit", "prepare", "close"):
                setattr(session, name, lambda *args, name=name: self.calls.append((name, *args)))
            return session

        def cost(self, k):
            return Cost(10 * k, k)

    model = Watched()
    both = LookupThenModel(PromptLookup(7), model)
    assert (both.name, both.taps, both.max_k, both.notes) == ("lookup_then_model", (1,), 5, ["Watch it."])
    assert both.cost(3) == Cost(30, 3)
    placed = place()
    session = both.start(TargetSession(placed, 20), 20, make_sampler(GREEDY, seed=0))
    hidden = torch.zeros(2, 32)
    session.prepare((4,))
    session.commit([1, 2], 0, hidden)
    session.close()
    assert model.calls == [("prepare", (4,)), ("commit", [1, 2], 0, hidden), ("close",)]


# --- drafters that break the protocol -----------------------------------------------------------------------------

IDS = torch.tensor([1, 2, 3])
TOO_FEW = Distribution(torch.full((2, VOCAB), 1 / VOCAB))
BROKEN = {
    "an id that is none": (Proposal(torch.tensor([3, VOCAB])), "an id that the target does not have.*in .0, 64"),
    "an id far outside": (Proposal(torch.tensor([2**40])), "an id that the target does not have"),
    "a negative id": (Proposal(torch.tensor([3, -2, 4])), "an id that the target does not have"),
    "nothing in the middle": (Proposal(torch.tensor([3, -1, 4])), "an id that the target does not have"),
    "a batch": (Proposal(IDS.unsqueeze(0)), r"whole numbers of shape \(m,\), got int64 of shape \(1, 3\)"),
    "one number": (Proposal(torch.tensor(3)), r"whole numbers of shape \(m,\), got int64 of shape \(\)"),
    "a list": (Proposal([1, 2, 3]), "must return a Proposal with a tensor of token ids, got a list"),
    "a bare list": ([1, 2, 3], "must return a Proposal with a tensor of token ids, got a list"),
    "none": (None, "must return a Proposal with a tensor of token ids, got a NoneType"),
    "floats": (Proposal(IDS.float()), r"whole numbers of shape \(m,\), got float32"),
    "truths": (Proposal(IDS > 1), r"whole numbers of shape \(m,\), got bool"),
    "too few rows": (Proposal(IDS, TOO_FEW), r"proposed 3 tokens, so q must have as many rows.*\(2, 64\)"),
    "q as a tensor": (Proposal(IDS, torch.full((3, VOCAB), 1 / VOCAB)), "must report q as None or as a Distribution"),
    "too wide": (Proposal(IDS, Distribution(torch.full((3, 99), 1 / 99))), "q over 99 ids; .* vocabulary has 64"),
    "ids without probabilities": (
        Proposal(IDS, Distribution(torch.full((3, 4), 0.25), torch.zeros(3, 5, dtype=torch.int64))),
        "as many rows of probabilities, and of ids where it is sparse",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("proposal", BROKEN)
def test_a_broken_proposal_is_refused_by_name_and_the_next_text_is_right(proposal, sampling):
    said, sentence = BROKEN[proposal]
    proposes = {"broken": True}
    fair = Proposal(torch.tensor([4, 4, 4]))
    drafter = Toy(lambda token, input_pos, k: said if proposes["broken"] else fair, "Ms. Wrong")
    engine = Engine(place(), drafter, max_length=50)
    with pytest.raises(InputError, match="drafter Ms. Wrong .*" + sentence):
        complete(drafter, sampling, engine=engine)
    assert len(engine) == 0
    proposes["broken"] = False
    plain = complete("none", sampling)
    again = complete(drafter, sampling, engine=engine)
    if sampling is REJECTION:  # there a proposal may change the text
        plain = complete(drafter, sampling)
    assert tokens_of(again) == tokens_of(plain)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, Sampling(top_k=9)], ids=["greedy", "coupled", "rejection"])
def test_unusual_but_valid_proposals_are_accepted(sampling):
    plain = tokens_of(complete("none", sampling))
    ids = torch.arange(9).expand(7, 9)
    sparse = Distribution(torch.full((7, 9), 1 / 9), ids)
    uniform = Distribution(torch.full((7, VOCAB), 1 / VOCAB, dtype=torch.float64))
    for said in (
        Proposal(torch.tensor([3, -1, -1])),
        Proposal(torch.tensor([-1])),
        Proposal(torch.tensor([3, 4], dtype=torch.int32)),
        Proposal(torch.tensor([3, 4], dtype=torch.uint8)),
        Proposal(torch.tensor([3] * 20)),  # more than were asked for
        Proposal(torch.tensor([3, 4]), sparse),  # more rows than tokens
        Proposal(torch.tensor([3, 4]), uniform),
    ):
        for k in (1, 4, 7):
            text = tokens_of(complete(Toy(lambda token, input_pos, k, said=said: said), sampling, k=k))
            assert len(text) == 40
            if sampling in (GREEDY, COUPLED):
                assert text == plain


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
def test_a_drafter_that_changes_its_arguments_does_not_change_the_text(sampling):
    class Greedy(ToySession):
        def __init__(self, spoil):
            super().__init__(lambda token, input_pos, k: Proposal(torch.tensor([token] * k)))
            self.spoil = spoil

        def commit(self, tokens, input_pos, hidden=None):
            self.spoil(tokens)

    class Spoiler(Drafter):
        def __init__(self, spoil):
            self.spoil = spoil

        def start(self, *args):
            return Greedy(self.spoil)

    prompt = list(PROMPT)
    fair = complete(Spoiler(lambda tokens: None), sampling, prompt=prompt)
    for spoil in (lambda tokens: tokens.append(7), lambda tokens: tokens.clear(), lambda tokens: tokens.reverse()):
        assert complete(Spoiler(spoil), sampling, prompt=prompt) == fair
        assert prompt == PROMPT


# --- choosing a drafter -----------------------------------------------------------------------------------------------


def test_auto_is_the_draft_model_if_there_is_one_else_prompt_lookup():
    assert isinstance(make_drafter("auto", place()), DraftModel)
    assert isinstance(make_drafter("auto", place(draft=None)), PromptLookup)
    assert make_drafter("none", place()) is None


def test_early_exit_uses_a_quarter_of_the_layers_by_default():
    assert [make_drafter("early_exit", place(gpt(n_layer=n))).exit_layer for n in (1, 3, 4, 9)] == [1, 1, 1, 2]
    drafter = make_drafter("early_exit", place(), exit_layer=2)
    assert isinstance(drafter, EarlyExit) and drafter.exit_layer == 2


def test_a_drafter_object_is_returned_unchanged():
    drafter = Reckless()
    assert make_drafter(drafter, place()) is drafter


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"drafter": "ngram"}, "drafter must be one of auto, .*, got 'ngram'"),
        ({"drafter": object()}, "subclass of litspec.drafters.Drafter, got a object"),
        ({"drafter": "draft_model"}, "draft_dir is not given"),
        ({"drafter": "early_exit", "exit_layer": 3}, "between 1 and the target's 2 layers, got 3"),
        ({"drafter": "early_exit", "exit_layer": 0}, "between 1 and the target's 2 layers, got 0"),
    ],
)
def test_an_unavailable_drafter_is_refused_with_an_error(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        make_drafter(placed=place(draft=None), **settings)
