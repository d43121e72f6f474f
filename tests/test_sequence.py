"""One text with scripted rounds: no model and no characters, only lengths and stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from litspec.engine.sequence import Block, Text
from litspec.stopping import StopTokens

PROMPT_SIZE = 3


def reference(stream: Sequence[int], budget: int, stops: Sequence[Sequence[int]], ignore_first: int) -> tuple:
    """The text, its finish reason, and the tokens needed to find it, by definition, token by token."""
    for n in range(1, budget + 1):
        found = [s for s in stops if n - len(s) >= ignore_first and list(stream[n - len(s) : n]) == list(s)]
        if found:
            return list(stream[: n - max(map(len, found))]), "stop", n
    return list(stream[:budget]), "length", budget


@dataclass
class Script:
    """A target whose text is `stream`; in each round it accepts up to `accepts[round]` proposals.

    Records what each round was asked for: the last token, its position, and how many proposals it may use.
    """

    stream: Sequence[int]
    accepts: Sequence[int] = (0,)
    withholds: Sequence[int] = (0,)  # number of allowed proposals that a round does not make
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    rounds: list[tuple[int, int, int]] = field(default_factory=list)  # first token, proposed, accepted

    def round(self, token: int, input_pos: int, k: int) -> tuple[list[int], int]:
        number = len(self.asked)
        self.asked.append((token, input_pos, k))
        proposed = max(0, k - self.withholds[number % len(self.withholds)])
        accepted = min(self.accepts[number % len(self.accepts)], proposed)
        begin = input_pos - PROMPT_SIZE + 1
        self.rounds.append((begin, proposed, accepted))
        return list(self.stream[begin : begin + accepted + 1]), proposed

    def decode(
        self, budget: int, k: int | Callable[[], int], stops: Sequence[Sequence[int]] = (), ignore_first: int = 0
    ) -> Iterator[Block]:
        """The blocks of the text, each made when it is asked for."""
        text = Text(PROMPT_SIZE, PROMPT_SIZE + budget, StopTokens(stops, ignore_first))
        assert not text.started
        yield text.commit(list(self.stream[:1]))
        assert text.started
        while not text.finished:
            most = min(k() if callable(k) else k, text.most_proposals)
            yield text.commit(*self.round(text.last, text.input_pos, most))


def text(blocks: Sequence[Block]) -> list[int]:
    return [token for block in blocks for token in block.tokens]


tokens = st.integers(0, 2)  # few, so that stops happen
stop_sets = st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=3)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Script, int, int, list[list[int]], int]:
    budget = draw(st.integers(1, 20))
    k = draw(st.integers(0, 6))
    script = Script(
        stream=draw(st.lists(tokens, min_size=budget + k + 1, max_size=budget + k + 1)),
        accepts=draw(st.lists(st.integers(0, k), min_size=1, max_size=8)),
        withholds=draw(st.lists(st.integers(0, k), min_size=1, max_size=3)),
    )
    return script, budget, k, draw(stop_sets), draw(st.sampled_from([0, 0, 1, 2, 5, 30]))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(scripts())
def test_the_text_is_that_of_the_stream_read_token_by_token(case: tuple) -> None:
    script, budget, k, stops, ignore_first = case
    blocks = list(script.decode(budget, k, stops, ignore_first))
    expected, finish, _ = reference(script.stream, budget, stops, ignore_first)

    assert text(blocks) == expected
    assert [block.finish_reason for block in blocks] == [None] * (len(blocks) - 1) + [finish]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(scripts())
def test_each_step_continues_behind_the_last_committed_token_and_never_drafts_what_cannot_be_used(case: tuple) -> None:
    script, budget, k, stops, ignore_first = case
    blocks = list(script.decode(budget, k, stops, ignore_first))
    _, _, needed = reference(script.stream, budget, stops, ignore_first)

    assert [block.round for block in blocks] == list(range(len(blocks)))
    assert len(script.asked) == len(blocks) - 1
    seen = 1
    for (token, input_pos, may_propose), (begin, _, accepted) in zip(script.asked, script.rounds):
        assert seen < needed, "a round after the text was known to have ended"
        assert (token, input_pos) == (script.stream[seen - 1], PROMPT_SIZE + seen - 1)
        assert may_propose == min(k, budget - seen - 1)
        assert begin == seen
        seen += accepted + 1
    assert needed <= seen <= budget


@settings(max_examples=150, deadline=None, derandomize=True)
@given(scripts())
def test_only_what_may_still_belong_to_a_stop_is_held_back(case: tuple) -> None:
    script, budget, k, stops, ignore_first = case
    seen = released = 0
    rounds = iter([(0, 0, 0)])
    for block in script.decode(budget, k, stops, ignore_first):
        released += len(block.tokens)
        begin, _, accepted = next(rounds, None) or script.rounds[block.round - 1]
        seen = begin + accepted + 1
        if block.finish_reason is None:
            tails = [list(script.stream[at:seen]) for at in range(ignore_first, seen)]
            held = [tail for tail in tails if any(len(tail) < len(s) and s[: len(tail)] == tail for s in stops)]
            assert seen - released == max(map(len, held), default=0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(scripts())
def test_proposals_and_acceptances_count_up_to_the_end_of_the_text(case: tuple) -> None:
    script, budget, k, stops, ignore_first = case
    blocks = list(script.decode(budget, k, stops, ignore_first))
    _, _, needed = reference(script.stream, budget, stops, ignore_first)

    assert (blocks[0].proposed, blocks[0].accepted) == (0, 0)
    drafted = [False]
    for block, (begin, proposed, accepted) in zip(blocks[1:], script.rounds):
        # Proposal i is at completion index begin + i. The end of the text is known only in the last round.
        end = needed if block is blocks[-1] else begin + proposed
        assert block.proposed == sum(begin + i < end for i in range(proposed))
        assert block.accepted == sum(begin + i < end for i in range(accepted))
        drafted += [True] * accepted + [False]
    flags = [flag for block in blocks for flag in block.drafted]
    assert flags == drafted[: len(flags)]
    assert all(len(block.drafted) == len(block.tokens) for block in blocks)


def test_a_hand_worked_text() -> None:
    # Prompt of 3, so the completion begins at position 3. Stop: 7 8. k = 3, room for 12 tokens.
    script = Script(stream=[1, 2, 3, 4, 5, 7, 6, 7, 7, 8, 9, 9, 9, 9], accepts=[3, 0, 2, 3])
    blocks = list(script.decode(12, 3, stops=[[7, 8]]))

    assert blocks == [
        Block([1], [False], round=0, proposed=0, accepted=0, finish_reason=None),
        Block([2, 3, 4, 5], [True, True, True, False], round=1, proposed=3, accepted=3, finish_reason=None),
        # The 7 may begin the stop: held back.
        Block([], [], round=2, proposed=3, accepted=0, finish_reason=None),
        # It did not, so it comes with the next round's tokens, whose last 7 is held back.
        Block([7, 6, 7], [False, True, True], round=3, proposed=3, accepted=2, finish_reason=None),
        # 8 completes the stop; of three proposals, all right, only that one lies before the end of the text.
        Block([], [], round=4, proposed=1, accepted=1, finish_reason="stop"),
    ]
    assert script.asked == [(1, 3, 3), (5, 7, 3), (7, 8, 3), (7, 11, 2)]


def test_a_stop_in_the_prefill_token_ends_the_text_before_any_round() -> None:
    script = Script(stream=[5, 6, 7])
    blocks = list(script.decode(3, 2, stops=[[5]]))

    assert blocks == [Block([], [], round=0, proposed=0, accepted=0, finish_reason="stop")]
    assert script.asked == []


def test_a_stop_beats_the_length_limit_in_the_same_round() -> None:
    blocks = list(Script(stream=[1, 2, 3, 4], accepts=[2]).decode(4, 3, stops=[[4]]))

    assert text(blocks) == [1, 2, 3]
    assert blocks[-1].finish_reason == "stop"


def test_tokens_held_for_a_stop_are_released_when_the_length_ends_the_text() -> None:
    blocks = list(Script(stream=[1, 2, 2]).decode(3, 0, stops=[[2, 2, 2]]))

    assert [block.tokens for block in blocks] == [[1], [], [2, 2]]
    assert blocks[-1].finish_reason == "length"


def test_a_stop_sequence_may_span_rounds() -> None:
    # A counter that falls back to 0 misses it: after 1 1, the third 1 is still a beginning.
    for accepts in ([0], [1], [2], [3], [0, 2], [1, 0]):
        blocks = list(Script(stream=[3, 1, 1, 1, 2, 5, 5, 5, 5], accepts=accepts).decode(6, 3, stops=[[1, 1, 2]]))
        assert text(blocks) == [3, 1], accepts


def test_with_one_token_left_a_round_is_a_plain_step() -> None:
    script = Script(stream=[1, 2, 3, 4, 5], accepts=[9])
    list(script.decode(2, 8))
    assert [k for _, _, k in script.asked] == [0]


def test_one_token_of_room_needs_no_round() -> None:
    script = Script(stream=[4, 5])
    assert text(list(script.decode(1, 4))) == [4]
    assert script.asked == []


def test_a_round_that_brings_more_than_there_is_room_for_is_cut() -> None:
    # As with a replaced `speculative_decoding` that ignores k.
    seven = Text(PROMPT_SIZE, PROMPT_SIZE + 7, StopTokens())
    blocks = [seven.commit([1])]
    while not seven.finished:
        blocks.append(seven.commit([2, 3, 4, 5], 3))
    assert text(blocks) == [1, 2, 3, 4, 5, 2, 3]
    assert [block.finish_reason for block in blocks] == [None, None, "length"]


def test_what_is_committed_is_not_the_callers_list() -> None:
    tokens = [1, 2, 3]
    longer = Text(PROMPT_SIZE, PROMPT_SIZE + 9, StopTokens([[2, 3, 3]]))
    block = longer.commit(tokens, 2)
    tokens.clear()
    assert block.tokens == [1]
    assert longer.commit([4]).tokens == [2, 3, 4]


def test_a_function_chooses_k_before_each_round() -> None:
    choices = iter([2, 0, 5, 1])
    script = Script(stream=list(range(40)), accepts=[9])
    blocks = script.decode(30, lambda: next(choices))
    for _ in range(5):
        next(blocks)
    assert [k for _, _, k in script.asked] == [2, 0, 5, 1]


def test_a_round_that_proposed_less_than_it_might_says_so() -> None:
    blocks = list(Script(stream=list(range(20)), accepts=[0], withholds=[3, 1]).decode(4, 4))
    # May: 2, 1, 0. Does without: 3, 1, 3.
    assert [block.proposed for block in blocks] == [0, 0, 0, 0]
    blocks = list(Script(stream=list(range(20)), accepts=[1], withholds=[1]).decode(8, 4))
    assert [(block.proposed, block.accepted) for block in blocks] == [(0, 0), (3, 1), (3, 1), (1, 1), (0, 0)]
