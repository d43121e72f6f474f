"""`litspec.testing` and `litspec verify`: our own drafters pass, and each kind of fault is detected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import scipy.stats
import torch
from checkpoints import write_checkpoint

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.commands.verify import _compare, _difference
from litspec.drafters import Drafter, DraftModel, DraftSession, Proposal
from litspec.sampling import Distribution, Sampling, Verified
from litspec.testing import P_VALUE, accept_rule_test, check_drafter, g_test, honesty


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> SpecLLM:
    folder = tmp_path_factory.mktemp("pair")
    return SpecLLM.load(write_checkpoint(folder / "target", seed=1), write_checkpoint(folder / "draft", seed=2))


def draft_model(llm: SpecLLM, kind: type[DraftModel] = DraftModel) -> DraftModel:
    return kind(llm.placed.draft_model, target_config=llm.placed.model.config, max_k=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "prompt_lookup", "early_exit", "lookup_then_model"])
def test_our_own_drafters_pass(llm: SpecLLM, name: str) -> None:
    check_drafter(llm.with_drafter(name).drafter, llm, rounds=5, draws=1024)


class Wrapped(Drafter):
    """A draft model with one violation of the protocol."""

    def __init__(self, llm: SpecLLM) -> None:
        self.inner = draft_model(llm)

    def start(self, *args: object) -> Wrapped.Session:
        return self.Session(self.inner.start(*args))

    class Session(DraftSession):
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
            self.inner.commit(tokens, input_pos, hidden)

        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            return self.inner.propose(token, input_pos, k)


class Liar(Wrapped):
    """Proposes the most likely token and reports the whole softmax."""

    class Session(Wrapped.Session):
        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            tokens, q = super().propose(token, input_pos, k)
            return Proposal(tokens if q is None else q.probs.argmax(1), q)


class Greedy(Wrapped):
    """Proposes more than k tokens."""

    class Session(Wrapped.Session):
        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            return super().propose(token, input_pos, k + 1)


class Forgetful(Wrapped):
    """Assumes that its last proposal was accepted."""

    class Session(Wrapped.Session):
        def __init__(self, inner: object) -> None:
            super().__init__(inner)
            self.last: list[int] = []

        def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
            believed = [*self.last, *tokens][: len(tokens)] if self.last else tokens
            super().commit(believed, input_pos, hidden)
            self.last = []

        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            proposal = super().propose(token, input_pos, k)
            self.last = proposal.tokens.tolist()
            return proposal


class Restless(Wrapped):
    """Proposes something else in each call."""

    class Session(Wrapped.Session):
        asked = 0

        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            self.asked += 1
            return Proposal((super().propose(token, input_pos, k).tokens + self.asked) % 256)


class Shared(Wrapped):
    """All sessions propose for the text that was started last."""

    latest: object = None

    def start(self, *args: object) -> Wrapped.Session:
        session = super().start(*args)
        self.latest = session.inner
        session.drafter = self
        return session

    class Session(Wrapped.Session):
        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            latest = self.drafter.latest
            return latest.propose(token, min(input_pos, len(latest._tokens) - 1), k)


class Unnormalised(Wrapped):
    """Reports weights that do not sum to 1."""

    class Session(Wrapped.Session):
        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            tokens, q = super().propose(token, input_pos, k)
            return Proposal(tokens, None if q is None else Distribution(2 * q.probs, q.ids))


class Silent(Wrapped):
    """Proposes nothing."""

    class Session(Wrapped.Session):
        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            return Proposal(torch.empty(0, dtype=torch.int64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (Liar, "Honesty"),
        (Greedy, "at most k"),
        (Forgetful, "Rollback"),
        (Restless, "Repeated"),
        (Shared, "Rollback"),
        (Unnormalised, "sum to 1"),
        (Silent, "proposed nothing"),
    ],
)
def test_each_violation_is_named(llm: SpecLLM, broken: type[Wrapped], word: str) -> None:
    with pytest.raises(AssertionError, match=word):
        check_drafter(broken(llm), llm, rounds=4, draws=1024 if broken is Liar else 0)


@pytest.mark.slow
def test_honesty_detects_a_slightly_wrong_distribution(llm: SpecLLM) -> None:
    """A slightly sharpened distribution, which no text would show."""

    class Sharpened(Wrapped):
        class Session(Wrapped.Session):
            def propose(self, token: int, input_pos: int, k: int) -> Proposal:
                tokens, q = super().propose(token, input_pos, k)
                sharp = q.probs ** (1 / 0.8)
                return Proposal(tokens, Distribution(sharp / sharp.sum(1, keepdim=True), q.ids))

    contexts = [[5, 6, 7, 8], [40, 41, 42]]
    sampling = Sampling(temperature=0.5)
    honest = honesty(draft_model(llm), llm, contexts, sampling=sampling)
    lying = honesty(Sharpened(llm), llm, contexts, sampling=sampling)
    assert all(test.p_value > P_VALUE for test in honest)
    assert all(test.p_value < P_VALUE for test in lying)


def test_the_g_test_is_that_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(12, generator=generator) + 0.2
    probs /= probs.sum()
    counts = torch.multinomial(probs, 2000, replacement=True, generator=generator).bincount(minlength=12)
    ours = g_test(counts, probs)
    expected = (probs.double() / probs.double().sum() * 2000).numpy()
    theirs = scipy.stats.power_divergence(counts.numpy(), expected, lambda_="log-likelihood")
    assert ours.statistic == pytest.approx(theirs.statistic)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-6)
    assert g_test(torch.tensor([5, 1]), torch.tensor([1.0, 0.0])).p_value == 0


@pytest.mark.slow
def test_a_wrong_accept_rule_is_caught() -> None:
    assert accept_rule_test(draws=20_000).p_value > P_VALUE

    def always_accept(logits: torch.Tensor, position: int, tokens: torch.Tensor, q: Distribution) -> Verified:
        return Verified(torch.cat((tokens, tokens[:1])), torch.tensor(len(tokens)), torch.tensor(True))

    def residual_twice(logits: torch.Tensor, position: int, tokens: torch.Tensor, q: Distribution) -> Verified:
        """Accepts correctly, but draws from p instead of the residual on rejection."""
        p = logits.softmax(1)
        accept = torch.rand(()) * q.probs[0, tokens[0]] < p[0, tokens[0]]
        own = torch.multinomial(p[0], 1)
        return Verified(tokens[:1] if accept else own, accept.long(), torch.tensor(True))

    torch.manual_seed(0)
    assert accept_rule_test(always_accept, draws=5_000).p_value < P_VALUE
    assert accept_rule_test(residual_twice, draws=20_000).p_value < P_VALUE


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in args])
    return exit_.value.code, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_verify_passes_and_exits_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr("litspec.commands.verify.CONTEXTS", 4)
    monkeypatch.setattr("litspec.commands.verify.TABLE_DRAWS", 10_000)
    target, draft = write_checkpoint(tmp_path / "target", seed=1), write_checkpoint(tmp_path / "draft", seed=2)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc abc abc\n\nhello\n")
    flags = ["verify", "--checkpoint_dir", target, "--draft_dir", draft, "--prompts_file", prompts]
    code, out = run(capsys, *flags, "--max_new_tokens", 40, "--precision", precision, "--output_format", "json")
    report = json.loads(out)
    assert code == 0 and report["passed"]
    names = [check["name"] for check in report["checks"]]
    for mode in ("greedy", "coupled"):
        assert [f"{mode}, {d}" for d in ("draft_model", "prompt_lookup", "suffix", "early_exit")] == [
            name for name in names if name.startswith(mode)
        ]
    assert "rejection, accept rule" in names and "rejection, honesty of draft_model" in names


@pytest.mark.slow
def test_verify_names_a_difference_and_exits_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("litspec.commands.verify.CONTEXTS", 1)
    monkeypatch.setattr("litspec.commands.verify.TABLE_DRAWS", 1_000)
    from litspec.sampling import Greedy as GreedySampler

    real = GreedySampler.verify

    def believes_drafts(self, logits, position, tokens, q=None):  # the fault: everything proposed is accepted
        verified = real(self, logits, position, tokens, q)
        n = (tokens >= 0).sum(-1)  # the rest of the block is padding
        believed = torch.arange(verified.tokens.size(-1)) < n.unsqueeze(-1)
        padded = torch.nn.functional.pad(tokens, (0, 1))
        return verified._replace(tokens=torch.where(believed, padded, verified.tokens), accepted=n)

    monkeypatch.setattr(GreedySampler, "verify", believes_drafts)
    target, draft = write_checkpoint(tmp_path / "target", seed=1), write_checkpoint(tmp_path / "draft", seed=2)
    flags = ["verify", "--checkpoint_dir", target, "--draft_dir", draft, "--max_new_tokens", 20]
    code, out = run(capsys, *flags, "--output_format", "json")
    report = json.loads(out)
    check = next(check for check in report["checks"] if check["name"] == "greedy, draft_model")
    assert code == 1 and not report["passed"] and not check["passed"]
    assert all(d["verdict"] == "fault" and d["alone"] != d["drafted"] for d in check["differences"])
    code, out = run(capsys, *flags)
    assert code == 1 and "FAILED" in out and "fault" in out and "logit margin" in out


def test_a_near_tie_is_called_one(llm: SpecLLM) -> None:
    alone = llm.with_drafter("none").generate("abc", max_new_tokens=12, temperature=0.0)
    ids = llm.codec.encode("abc").tolist()
    logits = llm.placed.model.prefill(torch.tensor([ids + alone.token_ids[:5]]), llm.placed.model.make_cache(64))[0, 0]
    second = int(logits.topk(2).indices[1])
    other = [*alone.token_ids[:5], second, *alone.token_ids[6:]]
    found = _difference(llm, 0, "abc", alone.token_ids, other, {"temperature": 0.0})
    assert (found.index, found.alone, found.drafted) == (5, alone.token_ids[5], second)
    assert found.margin == pytest.approx(float(logits.max() - logits[second]), abs=1e-5)
    assert found.verdict == "fault"

    weight = llm.placed.model.lm_head.weight
    saved = weight[second].clone()
    with torch.no_grad():
        weight[second] = weight[alone.token_ids[5]]  # now they are equal
        tie = _difference(llm, 0, "abc", alone.token_ids, other, {"temperature": 0.0})
        weight[second] = saved
    assert abs(tie.margin) < 1e-6 and tie.verdict == "rounding tie"
    assert not _compare(llm, "x", ["abc"], [alone], [alone.__class__(**vars(alone) | {"token_ids": other})], {}).passed


@pytest.mark.parametrize("top_k", [None, 5])
def test_proposals_beyond_k_and_of_another_integer_type_change_no_text(llm: SpecLLM, top_k: int | None) -> None:
    class Careless(Greedy):
        class Session(Greedy.Session):
            def propose(self, token: int, input_pos: int, k: int) -> Proposal:
                tokens, q = super().propose(token, input_pos, k)
                return Proposal(tokens.to(torch.int32), q)

    careless = llm.with_drafter(Careless(llm))
    for k in (1, 3):
        alone = llm.with_drafter("none").generate("abc", max_new_tokens=20, temperature=0.0)
        out = careless.generate("abc", max_new_tokens=20, temperature=0.0, speculative_k=k)
        assert out.token_ids == alone.token_ids
        sampled = careless.generate("abc", max_new_tokens=20, top_k=top_k, seed=1, speculative_k=k)
        assert len(sampled.token_ids) == 20 or sampled.finish_reason == "stop"
