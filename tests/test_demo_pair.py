"""The embedded pair has the properties that the README states, and its script can train another pair."""

from __future__ import annotations

import importlib.util
import json
import lzma
import math
import random
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType

import litgpt.tokenizer
import pytest
import torch
from litgpt.config import Config
from litgpt.generate.base import generate as litgpt_generate
from litgpt.model import GPT
from litgpt.prompts import Default, PromptStyle, load_prompt_style

from litspec.demo import DEMO_DRAFT, DEMO_TARGET
from litspec.generate import speculative_decoding

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_demo_pair.py"
PAIR = pytest.mark.parametrize("folder", [DEMO_TARGET, DEMO_DRAFT], ids=["target", "draft"])

# From the fourth chapter of Jane Austen's "Persuasion" (1818, public domain), a novel that the pair was not trained on.
HELD_OUT = """\
He was not Mr Wentworth, the former curate of Monkford, however
suspicious appearances may be, but a Captain Frederick Wentworth, his
brother, who being made commander in consequence of the action off St
Domingo, and not immediately employed, had come into Somersetshire, in
the summer of 1806; and having no parent living, found a home for half
a year at Monkford.  He was, at that time, a remarkably fine young man,
with a great deal of intelligence, spirit, and brilliancy; and Anne an
extremely pretty girl, with gentleness, modesty, taste, and feeling.
Half the sum of attraction, on either side, might have been enough, for
he had nothing to do, and she had hardly anybody to love; but the
encounter of such lavish recommendations could not fail.  They were
gradually acquainted, and when acquainted, rapidly and deeply in love.
It would be difficult to say which had seen highest perfection in the
other, or which had been the happiest: she, in receiving his
declarations and proposals, or he in having them accepted.

A short period of exquisite felicity followed, and but a short one.
Troubles soon arose.  Sir Walter, on being applied to, without actually
withholding his consent, or saying it should never be, gave it all the
negative of great astonishment, great coldness, great silence, and a
professed resolution of doing nothing for his daughter.  He thought it
a very degrading alliance; and Lady Russell, though with more tempered
and pardonable pride, received it as a most unfortunate one.

Anne Elliot, with all her claims of birth, beauty, and mind, to throw
herself away at nineteen; involve herself at nineteen in an engagement
with a young man, who had nothing but himself to recommend him, and no
hopes of attaining affluence, but in the chances of a most uncertain
profession, and no connexions to secure even his farther rise in the
profession, would be, indeed, a throwing away, which she grieved to
think of!  Anne Elliot, so young; known to so few, to be snatched off
by a stranger without alliance or fortune; or rather sunk by him into a
state of most wearing, anxious, youth-killing dependence!  It must not
be, if by any fair interference of friendship, any representations from
one who had almost a mother's love, and mother's rights, it would be
prevented.

Captain Wentworth had no fortune.  He had been lucky in his profession;
but spending freely, what had come freely, had realized nothing.  But
he was confident that he should soon be rich: full of life and ardour,
he knew that he should soon have a ship, and soon be on a station that
would lead to everything he wanted.  He had always been lucky; he knew
he should be so still.  Such confidence, powerful in its own warmth,
and bewitching in the wit which often expressed it, must have been
enough for Anne; but Lady Russell saw it very differently.  His
sanguine temper, and fearlessness of mind, operated very differently on
her.  She saw in it but an aggravation of the evil.  It only added a
dangerous character to himself.  He was brilliant, he was headstrong.
Lady Russell had little taste for wit, and of anything approaching to
imprudence a horror.  She deprecated the connexion in every light.

Such opposition, as these feelings produced, was more than Anne could
combat.  Young and gentle as she was, it might yet have been possible
to withstand her father's ill-will, though unsoftened by one kind word
or look on the part of her sister; but Lady Russell, whom she had
always loved and relied on, could not, with such steadiness of opinion,
and such tenderness of manner, be continually advising her in vain.
She was persuaded to believe the engagement a wrong thing:  indiscreet,
improper, hardly capable of success, and not deserving it.  But it was
not a merely selfish caution, under which she acted, in putting an end
to it.  Had she not imagined herself consulting his good, even more
than her own, she could hardly have given him up.  The belief of being
prudent, and self-denying, principally for his advantage, was her chief
consolation, under the misery of a parting, a final parting; and every
consolation was required, for she had to encounter all the additional
pain of opinions, on his side, totally unconvinced and unbending, and
of his feeling himself ill used by so forced a relinquishment.  He had
left the country in consequence.

A few months had seen the beginning and the end of their acquaintance;
but not with a few months ended Anne's share of suffering from it.  Her
attachment and regrets had, for a long time, clouded every enjoyment of
youth, and an early loss of bloom and spirits had been their lasting
effect.

More than seven years were gone since this little history of sorrowful
interest had reached its close; and time had softened down much,
perhaps nearly all of peculiar attachment to him, but she had been too
dependent on time alone; no aid had been given in change of place
(except in one visit to Bath soon after the rupture), or in any novelty
or enlargement of society.  No one had ever come within the Kellynch
circle, who could bear a comparison with Frederick Wentworth, as he
stood in her memory.  No second attachment, the only thoroughly
natural, happy, and sufficient cure, at her time of life, had been
possible to the nice tone of her mind, the fastidiousness of her taste,
in the small limits of the society around them.  She had been
solicited, when about two-and-twenty, to change her name, by the young
man, who not long afterwards found a more willing mind in her younger
sister; and Lady Russell had lamented her refusal; for Charles Musgrove
was the eldest son of a man, whose landed property and general
importance were second in that country, only to Sir Walter's, and of
good character and appearance; and however Lady Russell might have
asked yet for something more, while Anne was nineteen, she would have
rejoiced to see her at twenty-two so respectably removed from the
partialities and injustice of her father's house, and settled so
permanently near herself.  But in this case, Anne had left nothing for
advice to do; and though Lady Russell, as satisfied as ever with her
own discretion, never wished the past undone, she began now to have the
anxiety which borders on hopelessness for Anne's being tempted, by some
man of talents and independence, to enter a state for which she held
her to be peculiarly fitted by her warm affections and domestic habits."""


def load(folder: Path, max_seq_length: int | None = None) -> GPT:
    """The folder's weights in LitGPT's own model, float32, strictly: no tensor missing, none left over."""
    model = GPT(Config.from_file(folder / "model_config.yaml"))
    model.load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True, mmap=True), strict=True)
    model = model.float().eval().requires_grad_(False)
    if max_seq_length is not None:
        model.max_seq_length = max_seq_length
        model.set_kv_cache(batch_size=1)
    return model


@pytest.fixture(scope="module")
def held_out_tokens() -> torch.Tensor:
    return litgpt.tokenizer.Tokenizer(DEMO_TARGET).encode(HELD_OUT)


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    """Twenty pieces of 64 tokens, evenly spread over the novel that the pair was not trained on."""
    texts = json.loads((Path(__file__).parent / "held_out_prompts.json").read_text(encoding="utf-8"))
    tokenizer = litgpt.tokenizer.Tokenizer(DEMO_TARGET)
    return [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def pair() -> tuple[GPT, GPT]:
    return load(DEMO_DRAFT, 192), load(DEMO_TARGET, 192)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo_pair", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


# The pair


def test_the_pair_is_complete_and_at_most_14_megabytes() -> None:
    expected = ["generation_config.json", "lit_model.pth", "model_config.yaml", "prompt_style.yaml", "tokenizer.json"]
    for folder in (DEMO_TARGET, DEMO_DRAFT):
        names = {file.name for file in folder.iterdir()}
        assert names == {*expected, "tokenizer_config.json"}
    assert sum(file.stat().st_size for folder in (DEMO_TARGET, DEMO_DRAFT) for file in folder.iterdir()) <= 14_000_000


@PAIR
def test_the_weights_are_bf16_and_litgpt_loads_them_strictly(folder: Path) -> None:
    state = torch.load(folder / "lit_model.pth", weights_only=True, mmap=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in state.values()) == sum(p.numel() for p in load(folder).parameters())


def test_the_draft_has_one_layer_and_under_half_of_the_parameters() -> None:
    draft, target = load(DEMO_DRAFT), load(DEMO_TARGET)
    assert draft.config.n_layer == 1
    assert target.config.n_layer >= 12
    assert target.config.block_size == draft.config.block_size >= 1024
    assert 2 * sum(p.numel() for p in draft.parameters()) < sum(p.numel() for p in target.parameters())


def test_both_tokenizers_are_the_same_file() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (DEMO_TARGET / name).read_bytes() == (DEMO_DRAFT / name).read_bytes()


@PAIR
@pytest.mark.parametrize(
    "text", [HELD_OUT, "naïve café — 東京の朝、雨。", "🦙🏳️‍🌈 \t  two  spaces\r\n", " ", "\x00\x7f"]
)
def test_any_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = litgpt.tokenizer.Tokenizer(folder)
    ids = tokenizer.encode(text)
    assert int(ids.max()) < Config.from_file(folder / "model_config.yaml").vocab_size
    assert tokenizer.decode(ids) == text


@PAIR
def test_litgpt_finds_the_eos_adds_no_bos_and_applies_no_prompt_style(folder: Path) -> None:
    tokenizer, config = litgpt.tokenizer.Tokenizer(folder), Config.from_file(folder / "model_config.yaml")
    assert tokenizer.eos_id == tokenizer.token_to_id("<|endoftext|>")
    assert tokenizer.processor.encode("<|endoftext|>").ids == [tokenizer.eos_id]  # `encode` cuts an EOS off
    assert tokenizer.bos_id is None and not tokenizer.use_bos and not tokenizer.apply_decoding_fix
    assert isinstance(PromptStyle.from_config(config), Default)
    assert isinstance(load_prompt_style(folder), Default)
    assert config.vocab_size == config.padded_vocab_size == tokenizer.vocab_size


def test_transformers_reads_the_same_ids_from_the_tokenizer_files() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(DEMO_TARGET)
    assert tokenizer(HELD_OUT)["input_ids"] == litgpt.tokenizer.Tokenizer(DEMO_TARGET).encode(HELD_OUT).tolist()
    assert tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.slow
def test_the_target_predicts_better_than_a_compressor_also_in_long_texts(held_out_tokens: torch.Tensor) -> None:
    target = load(DEMO_TARGET)
    tokens = held_out_tokens.long()[: target.config.block_size + 1]
    losses = torch.nn.functional.cross_entropy(target(tokens[None, :-1])[0], tokens[1:], reduction="none")
    size = len(litgpt.tokenizer.Tokenizer(DEMO_TARGET).decode(tokens[1:]).encode())
    bits_per_byte = losses.sum().item() / math.log(2) / size
    compressed = 8 * len(lzma.compress(HELD_OUT.encode(), format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}]))
    assert bits_per_byte < 0.6 * compressed / len(HELD_OUT.encode())
    first, last = losses[:256].mean(), losses[768:].mean()
    assert last < first + 0.25  # 1.28 times the perplexity: the passages differ, a collapse would be far more


@pytest.mark.slow
def test_the_draft_predicts_the_greedy_target_and_the_text_is_the_targets(
    pair: tuple[GPT, GPT], prompts: list[torch.Tensor]
) -> None:
    rates = []
    for number, prompt in enumerate(prompts):
        tokens, rate = speculative_decoding.generate(*pair, prompt, len(prompt) + 24, temperature=0.0, speculative_k=4)
        rates.append(rate)
        if number % 4 == 0:
            # LitGPT takes the logits' argmax at temperature 0 only where top_p is above 0.
            alone = litgpt_generate(pair[1], prompt, len(prompt) + 24, temperature=0.0, top_p=1.0)
            assert tokens.tolist() == alone.tolist()
    # Acceptance varies with the prompt: over 200 of them, instead of these 20, it is 0.60.
    assert len(rates) == 20 and statistics.mean(rates) >= 0.60


@pytest.mark.slow
def test_the_draft_predicts_the_sampled_target_and_the_text_does_not_loop(
    pair: tuple[GPT, GPT], prompts: list[torch.Tensor]
) -> None:
    torch.manual_seed(1234)
    rates, distinct = [], []
    for prompt in prompts[::2]:
        tokens, rate = speculative_decoding.generate(
            *pair, prompt, len(prompt) + 80, temperature=0.8, include_prompt=False, speculative_k=4
        )
        grams = list(zip(*(tokens.tolist()[i:] for i in range(4))))
        rates.append(rate)
        distinct.append(len(set(grams)) / len(grams))
    assert statistics.mean(rates) >= 0.55
    assert statistics.mean(distinct) >= 0.8


@pytest.mark.slow
def test_a_draft_step_is_several_times_cheaper(pair: tuple[GPT, GPT]) -> None:
    # The minimum of many interleaved runs, so that a busy machine affects both equally; the README gives the median.
    fastest = [math.inf, math.inf]
    token, position = torch.tensor([[5]]), torch.tensor([100])
    for _ in range(60):
        for number, model in enumerate(pair):
            start = time.perf_counter()
            model(token, position, input_pos_maxp1=101)
            fastest[number] = min(fastest[number], time.perf_counter() - start)
    assert fastest[1] / fastest[0] >= 5


# The script


def corpus(folder: Path, holdout_text: str) -> Path:
    """Four files of made-up sentences, a fifth to hold out."""
    rng = random.Random(0)
    text = "the sea wind house walked slowly over a bright hill and old friend said that nothing more was left of it"
    words = text.split()
    folder.mkdir()
    for number in range(4):
        sentences = (" ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize() + "." for _ in range(400))
        (folder / f"{number}.txt").write_text("\n".join(sentences), encoding="utf-8")
    (folder / "held_out.txt").write_text(holdout_text, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_two_fast_runs_give_equal_weights_with_different_holdout_texts(script: ModuleType, tmp_path: Path) -> None:
    # Equal weights from other held-out texts: nothing of that file reaches tokenizer, target or draft.
    texts = "The old friend walked slowly. " * 200, HELD_OUT
    for number, text in enumerate(texts):
        data = corpus(tmp_path / f"data{number}", text)
        script.main(data, tmp_path / f"pair{number}", holdout="held_out.txt", fast=True)
    for role in ("target", "draft"):
        first, second = (torch.load(tmp_path / f"pair{n}" / role / "lit_model.pth", weights_only=True) for n in (0, 1))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
        load(tmp_path / "pair0" / role)
        tokenizers = [(tmp_path / f"pair{n}" / role / "tokenizer.json").read_bytes() for n in (0, 1)]
        assert tokenizers[0] == tokenizers[1]
        # A new pair does not have the name of the embedded one.
        assert Config.from_file(tmp_path / "pair0" / role / "model_config.yaml").name == f"pair0-{role}"

    figures = script.measure(tmp_path / "pair0" / "target", tmp_path / "pair0" / "draft", texts[0], prompts=2, seed=0)
    # Better than chance; more is not possible after two dozen steps.
    assert 1 < figures["perplexity"] < litgpt.tokenizer.Tokenizer(tmp_path / "pair0" / "target").vocab_size
    assert 0 <= figures["acceptance_0.8"] <= 1 and figures["tokens_per_round_0.8"] >= 1


@pytest.mark.parametrize(
    "files, words", [((), "'persuasion.txt' is not in"), (("persuasion.txt",), "only the holdout file")]
)
def test_a_folder_without_texts_is_refused_in_a_sentence(
    script: ModuleType, tmp_path: Path, files: tuple[str, ...], words: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("text", encoding="utf-8")
    with pytest.raises(SystemExit, match=words):
        script.main(tmp_path, tmp_path / "out")
