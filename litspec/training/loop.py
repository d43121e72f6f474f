"""The loop of training: steps, evaluations on held-out texts, saved states, early stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor

from litspec.errors import InputError
from litspec.sampling import Sampling
from litspec.training.config import DistillConfig
from litspec.training.files import write_in_place
from litspec.training.learner import Learner
from litspec.training.measure import expected_rounds
from litspec.training.run_files import RunFiles
from litspec.training.target import StatesOf

WEIGHT_DECAY = 0.1
CLIP = 1.0
WARM_UP = 0.04
LOWEST = 0.02  # of the highest learning rate, at the end
# Steps between two reads of the loss.
READ_EVERY = 10
# A smaller increase in tokens per round does not count as a gain.
LEAST_GAIN = 1e-3
MEASURED_AT_ONCE = 16


def default_learning_rate(learner: Learner, block_drafter: bool) -> float:
    """The learning rate, inversely proportional to the width and at most 3e-3.

    At 4,096 channels it is 1e-4 for draft models (as for EAGLE-3) and 6e-4 for block drafters (as in SpecForge).
    """
    return min(3e-3, (2.4 if block_drafter else 0.4) / learner.width)


def rate_at(progress: float) -> float:
    """The learning rate as a share of the highest, by progress (0 to 1): linear warm-up, then cosine decay."""
    cosine = LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return cosine * min(1.0, (progress + 1e-3) / WARM_UP)


class Training:
    """One run of training, on one of the ranks.

    Args:
        fabric: Lightning Fabric, launched.
        learner: The draft in training.
        texts: Number of texts to train on.
        train: States of the texts to train on.
        held_out: States of the held-out texts.
        measured: Number of held-out texts to measure on.
        files: The run's files.
        config: The settings.
        sampling: Sampling for which tokens per round are computed.
        seed: Seed of the order of texts and of the random numbers of a step.
        console: Console for progress.
    """

    def __init__(
        self,
        fabric: Fabric,
        learner: Learner,
        train: StatesOf,
        held_out: StatesOf,
        *,
        texts: int,
        measured: int,
        files: RunFiles,
        config: DistillConfig,
        sampling: Sampling,
        seed: int,
        console: Console,
    ) -> None:
        self.fabric, self.learner, self.train, self.held_out = fabric, learner, train, held_out
        self.texts, self.measured, self.files, self.config = texts, measured, files, config
        self.sampling, self.seed, self.console = sampling, seed, console
        self.k = learner.k if config.measured_k is None else min(config.measured_k, learner.k)
        trained = [p for p in learner.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.highest = config.learning_rate or default_learning_rate(learner, config.kind == "dflash")
        optimizer = torch.optim.AdamW(groups, lr=self.highest, betas=(0.9, 0.95))
        self.module, self.optimizer = fabric.setup(learner, optimizer)
        self.step, self.seconds, self.since_gain, self.ended = 0, 0.0, 0, ""
        self.history: list[dict[str, Any]] = []
        self._loss_sum, self._loss_steps = torch.zeros((), device=fabric.device), 0

    # --- state ---

    @property
    def state_bytes(self) -> int:
        """Approximate bytes of a saved state: trained weights and the optimizer's two averages, in float32."""
        return 12 * sum(p.numel() for p in self.learner.parameters() if p.requires_grad)

    def save(self) -> None:
        """Saves the state, on the first rank."""
        if self.fabric.is_global_zero:
            trained = {name for name, p in self.learner.named_parameters() if p.requires_grad}
            weights = {name: w for name, w in self.learner.state_dict().items() if name in trained}
            content = {
                "weights": weights,
                "optimizer": self.optimizer.state_dict(),
                "loss_sum": self._loss_sum,
                "numbers": {
                    "step": self.step,
                    "seconds": self.seconds,
                    "since_gain": self.since_gain,
                    "ended": self.ended,
                    "history": self.history,
                    "loss_steps": self._loss_steps,
                },
            }
            write_in_place(self.files.state, lambda path: torch.save(content, path))

    def restore(self) -> bool:
        """Resumes from the saved state, if there is one.

        Raises:
            InputError: The file is damaged.
        """
        if not self.files.state.exists():
            return False
        try:
            content = torch.load(self.files.state, map_location=self.fabric.device, weights_only=True)
        except Exception as error:  # a damaged file can raise almost any exception
            raise InputError(f"{str(self.files.state)!r} is damaged; remove it to start training again.") from error
        self.learner.load_state_dict(content["weights"], strict=False)
        self.optimizer.load_state_dict(content["optimizer"])
        numbers = content["numbers"]
        self.step, self.seconds, self.since_gain = numbers["step"], numbers["seconds"], numbers["since_gain"]
        self.ended, self.history = numbers["ended"], numbers["history"]
        self._loss_sum, self._loss_steps = content["loss_sum"], numbers["loss_steps"]
        return True

    # --- measuring ---

    @torch.no_grad()
    def measure(self, sampling: Sampling) -> dict[str, Any]:
        """Tokens per round on the held-out answers, computed from distributions, and acceptance by position."""
        found_ratios: list[Tensor] = []
        with self.fabric.autocast():
            for numbers in torch.arange(self.measured).split(MEASURED_AT_ONCE):
                found_ratios += self.learner.ratios(self.held_out.batch(numbers.tolist()), sampling)
        found = expected_rounds(found_ratios, self.k)
        return {
            "tokens_per_round": round(found.tokens_per_round, 4),
            "acceptance_by_position": [round(x, 4) for x in found.acceptance_by_position],
        }

    @property
    def best(self) -> dict[str, Any]:
        """The best evaluation so far, whose state is in the folder."""
        return max(self.history, key=lambda entry: (entry["kept"], entry["step"]))

    def evaluate(self) -> None:
        """Evaluates. Keeps the state after a gain, and ends training after too many evaluations without one."""
        entry: dict[str, Any] = {}
        if self.fabric.is_global_zero:
            loss = self._read_loss()
            entry = {"step": self.step, "seconds": round(self.seconds, 1), "loss": loss, **self.measure(self.sampling)}
            most = max((e["tokens_per_round"] for e in self.history if e["kept"]), default=0.0)
            entry["kept"] = not self.history or entry["tokens_per_round"] > most + LEAST_GAIN
            if entry["kept"]:
                self.learner.save(self.files.out)
        entry = self.fabric.broadcast(entry)
        self._loss_sum, self._loss_steps = torch.zeros_like(self._loss_sum), 0
        self.history.append(entry)
        self.since_gain = 0 if entry["kept"] else self.since_gain + 1
        if self.since_gain >= self.config.patience:
            self.ended = f"no gain in {self.since_gain} evaluations"
        self.save()
        start = self.history[0]["tokens_per_round"]
        said = "" if entry["loss"] is None else f"loss {entry['loss']:.4f}, "
        self._say(
            f"step {self.step}, {self.seconds / 60:.1f} min: {said}{entry['tokens_per_round']:.3f} tokens per round "
            f"(start {start:.3f}){'' if entry['kept'] else ', not kept'}"
        )

    def _read_loss(self) -> float | None:
        """The mean loss since the last evaluation.

        Raises:
            InputError: It is not finite.
        """
        if not self._loss_steps:
            return None
        loss = float(self._loss_sum) / self._loss_steps
        if not math.isfinite(loss):
            rate = self.optimizer.param_groups[0]["lr"]
            raise InputError(
                f"The loss is {loss} at step {self.step}; train with a learning_rate below {rate:.1e}, into a new "
                f"out_dir. {str(self.files.out)!r} keeps the best state before that."
            )
        return loss

    # --- steps ---

    @property
    def progress(self) -> float:
        """Progress of training, 0 to 1: by steps if `steps` is set, else by time."""
        if self.config.steps is not None:
            return self.step / self.config.steps
        return self.seconds / (60 * self.config.minutes)

    def _due(self) -> bool:
        """Whether to evaluate now: before the first step, `evaluations` times in between, and at the end."""
        return self.progress >= min(1.0, len(self.history) / self.config.evaluations)

    def numbers_of(self, step: int) -> list[int]:
        """The texts of this rank's batch: each epoch has its own order, divided among the ranks."""
        world, rank = self.fabric.world_size, self.fabric.global_rank
        size = min(self.config.batch_size, max(1, self.texts // world))
        per_epoch = self.texts // (size * world)
        epoch, batch = divmod(step, per_epoch)
        order = torch.randperm(self.texts, generator=torch.Generator().manual_seed(hash_of(self.seed, epoch)))
        begin = (batch * world + rank) * size
        return order[begin : begin + size].tolist()

    def _train_step(self) -> None:
        rate = self.highest * rate_at(self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self.train.batch(self.numbers_of(self.step))
        batch = self.learner.random(batch, hash_of(self.seed, self.step, self.fabric.global_rank))
        loss = self.module(batch)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.module, self.optimizer, max_norm=CLIP, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._loss_sum = self._loss_sum + loss.detach()
        self._loss_steps += 1
        self.step += 1

    def run(self) -> None:
        """Trains until the end, from the current step.

        Raises:
            InputError: The loss is not finite, or the disk is full.
        """
        saved = time.perf_counter()
        with self._bar() as show:
            while not self.ended:
                if self._agreed(self._due()):
                    self.evaluate()
                    saved = time.perf_counter()
                if self._agreed(self.progress >= 1) and not self.ended:
                    self.ended = "all steps done" if self.config.steps is not None else "the time is up"
                    self.save()
                if self.ended:
                    return
                began = time.perf_counter()
                self._train_step()
                if self.step % READ_EVERY == 0:
                    show(self._read_loss())
                    if time.perf_counter() - saved > self.config.save_seconds:
                        self.save()
                        saved = time.perf_counter()
                self.seconds += time.perf_counter() - began

    def _agreed(self, answer: bool) -> bool:
        """Rank 0's answer, since the ranks' clocks differ."""
        return bool(self.fabric.broadcast(answer)) if self.fabric.world_size > 1 else answer

    # --- progress ---

    def _say(self, line: str) -> None:
        if self.fabric.is_global_zero:
            self.console.print(line, highlight=False, soft_wrap=True)

    @contextmanager
    def _bar(self) -> Iterator[Callable[[float | None], None]]:
        columns = (
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} % {task.fields[left]}step {task.fields[step]} {task.fields[loss]}"),
        )
        shown = self.fabric.is_global_zero and self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=not shown) as bar:
            task = bar.add_task("", total=1.0, left="", step=self.step, loss="")

            def show(loss: float | None) -> None:
                progress = self.progress
                seconds = self.seconds * (1 - progress) / progress if progress > 0 else 0.0
                bar.update(
                    task,
                    completed=progress,
                    left=f"{seconds / 60:.1f} min left, " if progress > 0 else "",
                    step=self.step,
                    loss="" if loss is None else f"loss {loss:.3f}",
                )

            yield show


def hash_of(*numbers: int) -> int:
    """A seed derived from several numbers."""
    from litspec.jobs.disk import digest

    return int(digest(*(str(number) for number in numbers))[:15], 16)
