"""`litspec.reference` compared with independent laws and loops, and the engine compared with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines import COUPLED, DRAFT, GREEDY, PROMPT, SEED, TARGET, VOCAB, complete, litgpt_model, tokens_of
from laws import chi_square, follows
from litgpt.generate.base import generate as litgpt_generate

from litspec import reference
from litspec.sampling import Sampling, make_sampler

Model = Callable[[torch.Tensor], torch.Tensor]


def function(model: torch.nn.Module) -> Model:
    """LitGPT's model without a cache."""

    @torch.inference_mode()
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens.unsqueeze(0))[0]

    return logits


TARGET_LOGITS, DRAFT_LOGITS = function(litgpt_model(TARGET)), function(litgpt_model(DRAFT))


def generate(
    sampling: Sampling, *, new: int = 24, k: int = 4, seed: int = SEED, stops: tuple[int, ...] = ()
) -> list[int]:
    return reference.generate(
        TARGET_LOGITS,
        DRAFT_LOGITS,
        PROMPT,
        max_new_tokens=new,
        k=k,
        sampler=make_sampler(sampling, seed=seed),
        stop_ids=frozenset(stops),
    )


# --- the shortest form ------------------------------------------------------------------------------------------------


def test_its_greedy_text_is_that_of_litgpts_generate():
    model = litgpt_model(TARGET)
    size = len(PROMPT) + 24
    model.max_seq_length = size
    model.set_kv_cache(1)
    alone = litgpt_generate(model, torch.tensor(PROMPT), size, temperature=0.0)[len(PROMPT) :].tolist()
    assert len(set(alone)) > 8, "a text that says nothing"
    for k in (0, 1, 4, 7, 40):
        assert generate(GREEDY, k=k) == alone


def test_no_k_and_no_draft_changes_a_coupled_text():
    plain = generate(COUPLED, k=0)
    for k in (1, 4, 7):
        assert generate(COUPLED, k=k) == plain
    other = reference.generate(
        TARGET_LOGITS,
        lambda tokens: torch.zeros(len(tokens), VOCAB),
        PROMPT,
        max_new_tokens=24,
        k=3,
        sampler=make_sampler(COUPLED, seed=SEED),
    )
    assert other == plain
    assert generate(COUPLED, seed=1) != plain


# Two models as tables: the logits that follow each token, and here the token before it, of three.
IDS = 3
TARGET_TABLE = 1.5 * torch.randn(IDS, IDS, IDS, generator=torch.Generator().manual_seed(0))
DRAFT_TABLE = 1.5 * torch.randn(IDS, IDS, IDS, generator=torch.Generator().manual_seed(5))


def table(logits: torch.Tensor) -> Model:
    return lambda tokens: logits[torch.cat((tokens[:1], tokens[:-1])), tokens]


def law_of(table: torch.Tensor, first: int, temperature: float, count: int) -> torch.Tensor:
    """The law of the next tokens, by multiplication: a dimension for each."""
    probs = (table / temperature).softmax(-1)
    law = torch.zeros([IDS] * count)
    for index in torch.cartesian_prod(*[torch.arange(IDS)] * count).tolist():
        before, p = [first, first], 1.0
        for token in index:
            p *= float(probs[before[-2], before[-1], token])
            before.append(token)
        law[tuple(index)] = p
    return law


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
@pytest.mark.parametrize("k", [1, 3])
def test_its_sampled_texts_have_the_targets_law(k, sampler):
    # The last of four tokens is of another round than the first, for each of these k.
    sampling = Sampling(temperature=1.2, sampler=sampler)
    texts = [
        reference.generate(
            table(TARGET_TABLE),
            table(DRAFT_TABLE),
            [1, 1],
            max_new_tokens=4,
            k=k,
            sampler=make_sampler(sampling, seed=seed),
        )
        for seed in range(1000)
    ]
    law = law_of(TARGET_TABLE, 1, 1.2, 4)
    assert law.sum() == pytest.approx(1)
    assert follows(torch.tensor(texts), law)
    assert not follows(torch.tensor(texts), law_of(DRAFT_TABLE, 1, 1.2, 4)), "a draft that says the same proves nothing"


@pytest.mark.slow
def test_with_rejection_a_proposal_of_a_round_behind_a_refusal_leaves_no_trace_in_the_law():
    # The draft is certain of a token that the target rarely chooses, so nearly every round ends with a rejection.
    sure = torch.zeros(IDS, IDS, IDS)
    sure.scatter_(2, TARGET_TABLE.argmin(-1, keepdim=True), 6.0)
    texts = [
        reference.generate(
            table(TARGET_TABLE), table(sure), [2, 2], max_new_tokens=3, k=2, sampler=make_sampler(Sampling(), seed=seed)
        )
        for seed in range(1000)
    ]
    law = law_of(TARGET_TABLE, 2, 1.0, 3)
    assert follows(torch.tensor(texts), law)
    # Also the third token's law given the second: a rejection of one must not bias the other.
    for second in range(IDS):
        those = torch.tensor([text[2] for text in texts if text[1] == second])
        assert chi_square(those, law[:, second].sum(0)) > 1e-4


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_a_stop_ends_the_text_before_it(sampling):
    plain = generate(sampling)
    for at in (0, 1, 5, 23):
        stops = plain[at], plain[-1]
        first = next(i for i, token in enumerate(plain) if token in stops)
        for k in (0, 3, 7):
            assert generate(sampling, k=k, stops=stops) == plain[:first]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, Sampling()], ids=["greedy", "coupled", "rejection"])
def test_a_budget_is_used_up_and_nothing_is_drafted_behind_it(sampling):
    for new in (1, 2, 3, 8, 9):
        for k in (0, 1, 3, 12):
            longest = []

            def draft(tokens: torch.Tensor, longest: list[int] = longest) -> torch.Tensor:
                longest.append(len(tokens))
                return table(DRAFT_TABLE)(tokens)

            sampler = make_sampler(sampling if sampling is not COUPLED else Sampling(sampler="coupled"), seed=new)
            text = reference.generate(table(TARGET_TABLE), draft, [0, 0], max_new_tokens=new, k=k, sampler=sampler)
            assert len(text) == new
            # The last token is never drafted, so the draft's longest input ends two tokens before the last.
            assert max(longest, default=0) <= 2 + new - 2


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, Sampling()], ids=["greedy", "coupled", "rejection"])
def test_a_draft_that_is_the_target_is_always_accepted(sampling):
    passes = []

    def target(tokens: torch.Tensor) -> torch.Tensor:
        passes.append(len(tokens))
        return TARGET_LOGITS(tokens)

    for k, expected in ((0, 24), (1, 12), (3, 6), (5, 4)):
        passes.clear()
        sampler = make_sampler(sampling, seed=3)
        text = reference.generate(target, TARGET_LOGITS, PROMPT, max_new_tokens=24, k=k, sampler=sampler)
        assert (len(text), len(passes)) == (24, expected)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, Sampling(temperature=1.4, top_p=0.8, sampler="coupled")])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_texts_of_the_engine_are_its_texts(sampling, k):
    for seed in (SEED, 3):
        expected = generate(sampling, k=k, seed=seed)
        assert tokens_of(complete("draft_model", sampling, k=k, new=24, seed=seed)) == expected
        stop = expected[9]
        ended = tokens_of(complete("draft_model", sampling, k=k, new=24, seed=seed, stops=[[stop]]))
        assert ended == generate(sampling, k=k, seed=seed, stops=(stop,)) == expected[: expected.index(stop)]
