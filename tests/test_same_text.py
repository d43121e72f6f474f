"""The main claim: speculation changes the speed, never the text. On the embedded pair, to the bit."""

from __future__ import annotations

import pytest
import torch
from checkpoints import tiny_config

from litspec import SpecLLM
from litspec.model import GPT

# Openings of held-out chapters, of several lengths.
PROMPTS = [
    "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who, for his own amusement,",
    "Anne had been too little from home, too little seen.",
    "He was a very fine young man,",
    "It was",
    "Captain Wentworth had no fortune. He had been lucky in his profession; but spending freely,",
    "Mrs. Clay",
    "The Musgroves, like their houses, were in a state of alteration, perhaps of improvement.",
    "She had been forced into prudence in her youth,",
    "To Lyme they were to go--Charles, Mary, Anne, Henrietta, Louisa, and Captain Wentworth.",
    "A letter",
    "There was too much wind to make the high part of the new Cobb pleasant for the ladies,",
    "one two three one two three one two three one two",
    "\n\nChapter 12\n\n",
    "Lady Russell, then, was perfectly satisfied. She",
    "Oh!",
    "They were come too late in the year for any amusement or variety which Lyme, as a public place, might offer.",
    "I can listen no longer in silence. I must speak to you by such means as are within my reach.",
    "Mr. Elliot was rational, discreet, polished, but he was not open.",
    "Who can be in doubt of what followed?",
    "When any two young people take it into their heads to marry,",
]
TOKENS = 200
COUPLED = {"temperature": 0.8, "top_k": 50, "sampler": "coupled", "seed": 11}


@pytest.fixture(scope="module", params=["32-true", "bf16-true"])
def llm(request: pytest.FixtureRequest) -> SpecLLM:
    return SpecLLM.load(precision=request.param, accelerator="cpu")


def token_ids(llm: SpecLLM, drafter: str, prompts: list[str] = PROMPTS, **settings: object) -> list[list[int]]:
    with_drafter = llm.with_drafter(drafter)
    texts = with_drafter.generate(prompts, max_new_tokens=TOKENS, **settings)
    assert drafter == "none" or sum(text.stats.accepted for text in texts) > 0
    return [text.token_ids for text in texts]


@pytest.mark.slow
def test_greedy_no_drafter_and_every_drafter_at_every_k_give_the_same_tokens(llm: SpecLLM) -> None:
    alone = token_ids(llm, "none", temperature=0.0)
    assert len(PROMPTS) == 20 and sum(map(len, alone)) > 0.8 * 20 * TOKENS
    for k in range(1, llm.verify_width):
        assert token_ids(llm, "draft_model", temperature=0.0, speculative_k=k) == alone, f"draft_model at k = {k}"
    assert token_ids(llm, "prompt_lookup", temperature=0.0) == alone
    assert token_ids(llm, "lookup_then_model", temperature=0.0) == alone
    assert token_ids(llm, "early_exit", temperature=0.0, speculative_k=4) == alone


@pytest.mark.slow
def test_coupled_no_drafter_and_every_drafter_at_every_k_give_the_same_tokens(llm: SpecLLM) -> None:
    alone = token_ids(llm, "none", PROMPTS[:4], **COUPLED)
    for k in (*range(1, llm.verify_width), "auto"):
        assert token_ids(llm, "draft_model", PROMPTS[:4], speculative_k=k, **COUPLED) == alone, f"draft_model, k = {k}"
    for drafter in ("prompt_lookup", "lookup_then_model"):
        assert token_ids(llm, drafter, PROMPTS[:4], **COUPLED) == alone, drafter


def test_rejection_repeats_with_its_seed_and_a_further_prompt_changes_no_other(llm: SpecLLM) -> None:
    settings = {"temperature": 0.8, "top_k": 50, "seed": 5, "max_new_tokens": 40}
    both = llm.generate(PROMPTS[:2], **settings)
    three = llm.generate([*PROMPTS[:2], PROMPTS[2]], **settings)
    assert [text.token_ids for text in both] == [text.token_ids for text in three[:2]]
    assert llm.generate(PROMPTS[1], index=1, **settings).token_ids == both[1].token_ids
    other = llm.generate(PROMPTS[:2], **settings | {"seed": 6})
    assert [text.token_ids for text in other] != [text.token_ids for text in both]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_guarantee_rests_on_one_width_and_on_buckets(dtype: torch.dtype) -> None:
    """Logits differ with a variable number of rows and with exact K/V lengths."""
    torch.manual_seed(0)
    config = tiny_config(block_size=2048, n_embd=1024, n_head=16, n_query_groups=4, intermediate_size=2816)
    model = GPT(config).to(dtype).eval()
    tokens, width = torch.randint(config.vocab_size, (1, 1200)), 8
    cache = model.make_cache(1300, width=width)
    model.prefill(tokens, cache)
    by_width, by_length, by_both = 0, 0, 0
    for position in range(100, 1150, 75):
        input_pos, block = torch.tensor([position]), tokens[:, position : position + width]

        def first_row(rows: int, kv_length: int, block: torch.Tensor = block, at: torch.Tensor = input_pos):
            return model.verify(block[:, :rows], at, cache, kv_length=kv_length)[0, 0]

        bucket = cache.bucket(position + width)
        guaranteed = first_row(width, bucket)
        # Guaranteed: a row does not depend on the other rows.
        junk = block.clone()
        junk[0, 1:] = 7
        assert torch.equal(first_row(width, bucket, junk), guaranteed)
        by_width += not torch.equal(first_row(1, bucket), guaranteed)
        by_length += not torch.equal(first_row(width, position + width), guaranteed)
        by_both += not torch.equal(first_row(1, position + 1), guaranteed)
    assert by_both > 0 and by_length > 0
    # In bf16 some processors round products of one row and of eight rows equally.
    assert by_width > 0 or dtype is torch.bfloat16
