"""Tokens per second and peak memory as the context grows, beside LitGPT's `GPT` with the same weights in one process.

    python scripts/bench_growth.py --plot growth.png            contexts of 512, 2,048, 8,192 and 32,768 positions
    python scripts/bench_growth.py --contexts 512,4096 --output_format json

The model is small, so that what grows shows: 2 layers, 8 heads of size 32 in 2 groups, 4,096 tokens, random float32
weights. The caches are filled with random numbers. Each model then runs the last position of the context (one row, as
plain decoding does), and the last 8 as one block (as checking 7 proposals does). LitGPT runs as its own generate loop
runs it: cached, with `input_pos_maxp1` given. Times are medians, all calls taking turns. In its turn a call runs five
times and the last is timed: decoding finds the processor's caches as its own steps left them, not the other model's.

A step may slow down only by the attention's own bytes: the keys and values (K/V) it reads. Beside the milliseconds that
a context adds to those of the first stand two yardsticks: how long the added K/V take at the speed at which the machine
copies memory, and how long PyTorch's attention operator alone takes over them, nothing masked. What a step adds beyond
the operator is not the attention's.

Peak memory is what tensors hold at once beyond the weights: while the cache is set up (rotary tables and LitGPT's mask
included), and what a step needs beyond the cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import litgpt.model
import torch
import torch.nn.functional as F
from bench_forward import LLAMA, peak_bytes
from litgpt.config import Config
from rich.console import Console
from rich.table import Table

from litspec.benchmark import copy_bandwidth, interleaved
from litspec.model import GPT

CPU = torch.device("cpu")
WIDTHS = (1, 8)  # rows of a step
TURN = 5  # runs of a call in its turn, of which the last is timed
MOST = 65_536  # LitGPT's mask takes the square of the context in bytes, and twice that while it is made
COLORS = {"litgpt": "#D55E00", "litspec": "#0072B2"}  # Okabe and Ito's, which colour-blind eyes tell apart
MODELS = tuple(COLORS)


@dataclass
class Row:
    """A step of some width at the end of a context; dictionaries go by the names of the models.

    Attributes:
        context: Positions, those of the step included.
        width: Rows of the step.
        kv_bytes: Bytes of keys and values that litspec's step reads.
        seconds: Of a step, and under "attention" of the operator alone over as many keys and values.
        setup_bytes: Peak while the cache is set up.
        step_bytes: Peak of a step beyond the cache.
    """

    context: int
    width: int
    kv_bytes: int
    seconds: dict[str, float]
    setup_bytes: dict[str, int]
    step_bytes: dict[str, int]

    def tokens_per_second(self, name: str) -> float:
        """Where a step brings one token, as one of one row does."""
        return 1 / self.seconds[name]


@torch.inference_mode()
def measure(config: Config, context: int, repeats: int) -> list[Row]:
    """Both models at the end of a context, a row for each width."""
    torch.manual_seed(0)
    theirs, ours = litgpt.model.GPT(config).eval(), GPT(config).eval()
    ours.load_state_dict(theirs.state_dict())
    caches = []

    def set_up() -> None:
        theirs.max_seq_length = context
        theirs.set_kv_cache(batch_size=1)

    setup_bytes = {
        "litgpt": peak_bytes(set_up),
        "litspec": peak_bytes(lambda: caches.append(ours.make_cache(context, width=max(WIDTHS)))),
    }
    (cache,) = caches
    for block, k, v in zip(theirs.transformer.h, cache.k, cache.v):
        kv = block.attn.kv_cache
        kv.k.normal_(), kv.v.normal_()
        k[:, :, :context], v[:, :, :context] = kv.k, kv.v
    kv_length = cache.bucket(context)
    read = [(k[:, :, :kv_length], v[:, :, :kv_length]) for k, v in zip(cache.k, cache.v)]

    def steps(width: int) -> dict[str, Callable[[], Any]]:
        idx = torch.randint(config.vocab_size, (1, width))
        positions, first = torch.arange(context - width, context), torch.tensor([context - width])
        # The query heads of a group are rows of one head: nothing is read twice.
        q = torch.randn(1, config.n_query_groups, config.n_head // config.n_query_groups * width, config.head_size)
        return {
            "litgpt": lambda: theirs(idx, positions, context),
            "litspec": lambda: ours.verify(idx, first, cache, kv_length=kv_length),
            "attention": lambda: [F.scaled_dot_product_attention(q, k, v) for k, v in read],
        }

    calls = {(width, name): call for width in WIDTHS for name, call in steps(width).items()}
    for width in WIDTHS:
        want, got = calls[width, "litgpt"](), calls[width, "litspec"]()
        assert (want - got).abs().max() < 1e-3 * want.abs().max(), "the two models disagree"
    step_bytes = {key: peak_bytes(call) for key, call in calls.items()}
    turns = {(*key, run): call for key, call in calls.items() for run in range(TURN)}
    seconds = interleaved(turns, repeats, CPU)
    return [
        Row(
            context, width, sum(k.nbytes + v.nbytes for k, v in read),
            {name: seconds[width, name, TURN - 1] for name in (*MODELS, "attention")}, setup_bytes,
            {name: step_bytes[width, name] for name in MODELS},
        )
        for width in WIDTHS
    ]  # fmt: skip


@dataclass
class Growth:
    """What a context added to a step at the first context.

    Attributes:
        context, width: Of the step.
        kv_bytes: Keys and values.
        copy_seconds: How long they take at the speed of a copy.
        seconds: As `Row.seconds`.
        bytes_per_second: `kv_bytes` over `seconds`; None where noise left nothing to divide by.
    """

    context: int
    width: int
    kv_bytes: int
    copy_seconds: float
    seconds: dict[str, float]
    bytes_per_second: dict[str, float | None]

    @classmethod
    def between(cls, first: Row, row: Row, bandwidth: float) -> Growth:
        added = row.kv_bytes - first.kv_bytes
        seconds = {name: now - first.seconds[name] for name, now in row.seconds.items()}
        rates = {name: added / value if value > 0 else None for name, value in seconds.items()}
        return cls(row.context, row.width, added, added / bandwidth, seconds, rates)

    def in_words(self, first: Row) -> str:
        """How much of the slowdown is the attention's."""
        step = f"{self.width} row{'s' if self.width > 1 else ''}, {first.context:,} to {self.context:,} positions:"
        if min(self.seconds.values()) <= 0:
            return f"{step} noise drowned the growth; run again on an idle machine."
        ms = {name: f"{value * 1e3:.2f} ms" for name, value in self.seconds.items()}
        beyond = self.seconds["litspec"] - self.seconds["attention"]
        return (
            f"{step} {self.kv_bytes / 2**20:.1f} MiB more of K/V take {self.copy_seconds * 1e3:.2f} ms at the speed of "
            f"a copy, {ms['attention']} in the attention operator alone. litspec's step takes {ms['litspec']} more, "
            f"{beyond * 1e3:.2f} ms beyond the operator; litgpt's {ms['litgpt']} more."
        )


def table(title: str, heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> Table:
    """Right-aligned columns under a title."""
    made = Table(title=title, title_justify="left")
    for head in heads:
        made.add_column(head, justify="right")
    for line in lines:
        made.add_row(*line)
    return made


def tables(rows: list[Row], growths: list[Growth], bandwidth: float) -> list[Table]:
    """Speed, growth and memory."""

    def ms(seconds: dict[str, float], names: tuple[str, ...] = (*MODELS, "attention")) -> tuple[str, ...]:
        return tuple(f"{seconds[name] * 1e3:.2f}" for name in names)

    def mib(*counts: int) -> tuple[str, ...]:
        return tuple(f"{count / 2**20:,.2f}" for count in counts)

    def at(line: Row | Growth) -> tuple[str, str]:
        return str(line.width), f"{line.context:,}"

    names = (*MODELS, "attention")
    speed = table(
        "Speed of a step (tokens/s: where it brings one token)",
        ("rows", "context", *(f"{name} tokens/s" for name in MODELS), "ratio", *(f"{name} ms" for name in names)),
        [
            (*at(row), *(f"{row.tokens_per_second(name):,.0f}" for name in MODELS),
             f"{row.seconds['litgpt'] / row.seconds['litspec']:.2f}", *ms(row.seconds))
            for row in rows
        ],
    )  # fmt: skip
    grown = table(
        f"Added since the first context; a copy moves {bandwidth / 1e9:.1f} GB/s",
        ("rows", "context", "K/V MiB", "copied ms", *(f"{name} {unit}" for unit in ("ms", "GB/s") for name in names)),
        [
            (*at(line), *mib(line.kv_bytes), f"{line.copy_seconds * 1e3:.2f}", *ms(line.seconds),
             *("-" if rate is None else f"{rate / 1e9:.1f}" for rate in map(line.bytes_per_second.get, names)))
            for line in growths
        ],
    )  # fmt: skip
    memory = table(
        "Peak memory, MiB: of setting up the cache, and of a step beyond the cache",
        ("rows", "context", *(f"{name} {part}" for part in ("set-up", "step") for name in MODELS)),
        [
            (*at(row), *mib(*(part[name] for part in (row.setup_bytes, row.step_bytes) for name in MODELS)))
            for row in rows
        ],
    )  # fmt: skip
    return [speed, grown, memory] if growths else [speed, memory]


def plot(rows: list[Row], path: Path) -> None:
    """Steps of one row: tokens per second on the left, peak memory on the right."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.width == 1]
    contexts = [row.context for row in rows]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, memory = figure.subplots(1, 2)

    def line(axes: Any, name: str, values: list[float], label: str, style: str = "-") -> None:
        # Labels stay apart where lines meet, and off the axis.
        va = {"litgpt": "bottom", "litspec": "top"} if axes is memory else {"litgpt": "center", "litspec": "bottom"}
        axes.plot(contexts, values, style, color=COLORS[name], marker="o", markersize=5)
        axes.annotate(
            label, (contexts[-1], values[-1]), textcoords="offset points", xytext=(9, 0), color=COLORS[name],
            va=va[name],
        )  # fmt: skip

    rest = rows[0].seconds["litspec"] - rows[0].seconds["attention"]
    speed.plot(
        contexts, [1 / (rest + row.seconds["attention"]) for row in rows], ":", color="0.4",
        label="litspec, if only the attention operator grew",
    )  # fmt: skip
    for name in MODELS:
        line(speed, name, [row.tokens_per_second(name) for row in rows], name)
        line(memory, name, [row.setup_bytes[name] / 2**20 for row in rows], f"{name}, set-up")
        line(memory, name, [row.step_bytes[name] / 2**20 for row in rows], f"{name}, a step", "--")
    speed.set_ylim(0, 1.15 * max(row.tokens_per_second(name) for row in rows for name in MODELS))
    speed.legend(frameon=False, loc="upper right")
    speed.set_title("Decoding, one row per step", loc="left", fontsize=11)
    speed.set_ylabel("tokens / s")
    speed.yaxis.set_major_formatter("{x:,g}")
    memory.set_yscale("log")
    memory.yaxis.set_major_formatter("{x:,g}")
    memory.set_title("Peak memory: setting up the cache, and a step beyond it", loc="left", fontsize=11)
    memory.set_ylabel("MiB")
    for axes in (speed, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.set_xlabel("context, positions")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.8)
    figure.savefig(path, dpi=150)


def context_list(text: str) -> list[int]:
    """The contexts in a comma list, ascending."""
    try:
        contexts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of positions, such as 512,2048") from None
    for context in contexts:
        if not max(WIDTHS) <= context <= MOST:
            raise argparse.ArgumentTypeError(f"a context has {max(WIDTHS)} to {MOST:,} positions, not {context:,}")
    return contexts


def main() -> None:
    """Measure, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", type=context_list, default="512,2048,8192,32768", help="positions, a comma list")
    parser.add_argument("--repeats", type=int, default=20, help="turns of each call")
    parser.add_argument("--threads", type=int, default=None, help="threads of PyTorch's operators")
    parser.add_argument("--plot", type=Path, default=None, help="write a picture here, such as growth.png")
    parser.add_argument("--output_format", choices=("text", "json"), default="text", help="tables, or one object")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"argument --repeats: needs at least one turn, not {args.repeats}")
    if args.plot is not None:
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ModuleNotFoundError:
            parser.error('argument --plot: needs matplotlib; install it with: pip install "litspec[bench]"')
        if args.plot.suffix[1:] not in FigureCanvasBase.get_supported_filetypes() or not args.plot.parent.is_dir():
            parser.error(f"argument --plot: {str(args.plot)!r} does not name a picture, such as .png, in a folder")
    if args.threads:
        torch.set_num_threads(args.threads)

    config = Config(
        n_layer=2, n_embd=256, n_head=8, n_query_groups=2, intermediate_size=704, vocab_size=4096,
        padded_vocab_size=4096, block_size=2 * args.contexts[-1], **LLAMA,
    )  # fmt: skip
    bandwidth = copy_bandwidth(CPU)
    found = [measure(config, context, args.repeats) for context in args.contexts]
    rows = [row for of_width in zip(*found) for row in of_width]
    first = {row.width: row for row in found[0]}
    growths = [Growth.between(first[row.width], row, bandwidth) for row in rows if row is not first[row.width]]
    if args.plot is not None:
        plot(rows, args.plot)
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads(), "repeats": args.repeats}
    if args.output_format == "json":
        speeds = [{"tokens_per_second": {name: row.tokens_per_second(name) for name in MODELS}} for row in rows]
        report = {
            "copy_bandwidth": bandwidth,
            "rows": [asdict(row) | speed for row, speed in zip(rows, speeds)],
            "growth": [asdict(line) for line in growths],
        }
        print(json.dumps(setting | report))
        return
    out = Console(width=None if Console().is_terminal else 120, highlight=False)
    out.print(", ".join(f"{name} {value}" for name, value in setting.items()))
    for made in tables(rows, growths, bandwidth):
        out.print(made)
    for line in growths:
        if line.context == args.contexts[-1]:
            out.print(line.in_words(first[line.width]))


if __name__ == "__main__":
    main()
