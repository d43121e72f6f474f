"""`distill`: trains a draft for a target on its texts."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from litgpt.config import Config
from rich.console import Console

from litspec.arguments import spelled_out
from litspec.checkpoint import Checkpoint, open_checkpoint, read_state_dict
from litspec.config import GenerateConfig, LoadConfig
from litspec.demo import DEMO_DRAFT, DEMO_TARGET
from litspec.errors import InputError
from litspec.jobs import run_job
from litspec.jobs.deciding import checkpoint_digest
from litspec.jobs.disk import digest, load_line, whole_lines, write_atomically
from litspec.placement import process_rank
from litspec.sampling import Sampling
from litspec.text import TextCodec
from litspec.training.config import DEFAULTS, NOT_OFFERED, DistillConfig
from litspec.training.dflash import BlockDrafter, network_config, spread_taps
from litspec.training.draft_model import DraftModel, first_layers, shared_vocabulary
from litspec.training.learner import Learner
from litspec.training.loop import Training
from litspec.training.picture import draw, has_matplotlib
from litspec.training.run_files import RunFiles
from litspec.training.target import FrozenTarget, StatesOf
from litspec.training.texts import Text, all_done, chosen_texts, read_prompts, write_answers, write_lines

DRAFT_MODEL_K = 4
TEXT_BYTES = 16  # file size per token that the target writes; an upper estimate
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}


@spelled_out(without=NOT_OFFERED, defaults=DEFAULTS, load=LoadConfig, config=DistillConfig, settings=GenerateConfig)
def distill(
    data: str | Path,
    out_dir: str | Path,
    load: LoadConfig,
    *,
    config: DistillConfig,
    settings: GenerateConfig,
) -> dict[str, Any]:
    """Trains a draft for a target. The target answers prompts, and the draft learns the target's distributions on them.

    The same call resumes an interrupted run. On a CPU with `steps` the result is that of an uninterrupted run.

    Args:
        data: Prompts like those of later use. A .jsonl file holds one object per line, with "prompt" and optionally an
            answer, "text". A .txt file holds one prompt per line. Other text is split into prompts. A folder
            of such files is accepted too.
        out_dir: The folder for the draft, for `draft_dir`. It must not exist, or be that of an earlier run with the
            same settings.
        {load}
        {config}
        {settings}

    Returns:
        The content of `distill.json`. `start`, `best` and `history` are evaluations: tokens per round on held-out
        answers, computed from distributions. `served` is what litspec then measured on the same prompts.

    Raises:
        InputError: A folder, file or setting cannot be used, or the loss is not finite. Progress is kept.
    """
    return Distillation(data, out_dir, load, config, settings).run()


class Distillation:
    """One call of `distill`, with its arguments."""

    def __init__(
        self, data: str | Path, out_dir: str | Path, load: LoadConfig, config: DistillConfig, settings: GenerateConfig
    ) -> None:
        self.data, self.load, self.config, self.settings = data, load, config, settings
        if settings.seed is None:
            raise InputError("seed must be a whole number, so that training can be resumed, got None")
        self.seed: int = settings.seed
        self.target = open_checkpoint(
            DEMO_TARGET if load.checkpoint_dir is None else load.checkpoint_dir, may_convert=load.convert
        )
        self.start = self._start()
        self.files = RunFiles(
            out_dir,
            {"checkpoint_dir": self.target.dir, "draft_dir": self.start.dir if self.start is not None else None},
        )
        self.codec = TextCodec(self.target.dir, self.target.config, trust_prompt_style=load.trust_prompt_style)
        self.k = config.measured_k or (DRAFT_MODEL_K if config.kind == "draft_model" else config.block_size - 1)
        if config.kind == "dflash" and self.k >= config.block_size:
            raise InputError(
                f"measured_k must be below block_size, which is {config.block_size}, got {config.measured_k}"
            )
        self.sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        self.console = Console(stderr=True)
        self.first = process_rank() == 0

    def _start(self) -> Checkpoint | None:
        """The checkpoint that a draft model starts from; None if it starts from something else."""
        load, config = self.load, self.config
        other = [name for name in ("from_layers", "draft_config") if getattr(config, name) is not None]
        if load.draft_dir is not None and (other or config.kind == "dflash"):
            what = other[0] if other else "kind dflash"
            raise InputError(f"draft_dir and {what} cannot be combined; give one of them.")
        if config.kind == "dflash" or other:
            return None
        if load.draft_dir is not None:
            return open_checkpoint(load.draft_dir, role="draft_dir", may_convert=load.convert)
        if load.checkpoint_dir is None:
            return open_checkpoint(DEMO_DRAFT, role="draft_dir")
        raise InputError(
            "Training needs a starting point: give draft_dir (a LitGPT checkpoint with the target's tokenizer), "
            "from_layers (the target's own first layers), draft_config (a new model), or kind dflash."
        )

    def run(self) -> dict[str, Any]:
        if not self.first:
            return self._run()
        with self.files.locked():
            return self._run()

    def _run(self) -> dict[str, Any]:
        config = self.config
        prompts = read_prompts(
            self.data, self.codec, limit=config.texts, seed=self.seed, prompt_tokens=config.prompt_tokens
        )
        if self.first:
            self.files.begin(self._asked(prompts))
        if self.files.summary.exists():
            summary: dict[str, Any] = json.loads(self.files.summary.read_text(encoding="utf-8"))
            self._say(f"{str(self.files.out)!r} is complete; there is nothing left to do.")
            return summary
        self.files.check_room(len(prompts) * self.settings.max_new_tokens * TEXT_BYTES)
        answers = write_answers(prompts, self.files.folder, load=self._job_load(), settings=self._job_settings())
        train, held_out = chosen_texts(
            prompts,
            answers,
            self.codec,
            sys_prompt=self.settings.sys_prompt,
            longest=self._longest(),
            held_out=config.held_out,
        )
        fabric = self._fabric()
        training = self._training(fabric, train, held_out)
        needed = self._bytes_needed(training, prompts)
        self._say(
            f"{len(train)} texts of {sum(len(t.ids) - t.start for t in train):,} answer tokens to train on, "
            f"{len(held_out)} held out; {sum(p.numel() for p in training.learner.parameters()) / 1e6:.2f} M "
            f"parameters, highest learning rate {training.highest:.1e}; at most {needed / 1e6:,.0f} MB on disk."
        )
        self.files.check_room(needed)
        if training.restore():
            self._say(f"Resuming from step {training.step}.")
        training.run()
        fabric.barrier()
        return self._finish(training, train, held_out)

    # --- settings ---

    def _asked(self, prompts: list[dict[str, Any]]) -> dict[str, Any]:
        """All settings that decide the result."""
        config = self.config
        asked = {f.name: getattr(config, f.name) for f in fields(config) if not f.metadata["resumes"]}
        asked |= {name: getattr(self.settings, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
        asked |= {"seed": self.seed, "sys_prompt": self.settings.sys_prompt, "precision": self.load.precision}
        asked |= {"target": checkpoint_digest(self.target), "draft": self.start and checkpoint_digest(self.start)}
        return {**asked, "prompts": digest(*(json.dumps(prompt, sort_keys=True) for prompt in prompts))}

    def _job_load(self, **more: Any) -> dict[str, Any]:
        """Arguments of `SpecLLM.load` for the texts that the target writes."""
        load = self.load
        several = load.devices not in (1, "1")
        found = {
            "checkpoint_dir": self.target.dir,
            "draft_dir": self.start and self.start.dir,
            "drafter": "draft_model" if self.start else "prompt_lookup",
            "accelerator": load.accelerator,
            "devices": load.devices,
            "placement": "replicate" if several else "single",
            "precision": load.precision,
            "trust_prompt_style": load.trust_prompt_style,
            "verify_width": max(8, self.k + 1),
        }
        return found | more

    def _job_settings(self) -> dict[str, Any]:
        names = ("sys_prompt", "max_new_tokens", "temperature", "top_k", "top_p")
        return {name: getattr(self.settings, name) for name in names} | {"seed": self.seed}

    def _longest(self) -> int:
        models = [self.target.config.block_size]
        if self.start is not None:
            models.append(self.start.config.block_size)
        if self.config.draft_config is not None:
            models.append(self._new_config(self.config.draft_config).block_size)
        return min(models)

    def _new_config(self, path: str) -> Config:
        """The config of a new draft model, checked.

        Raises:
            InputError: The file is not a model_config.yaml, or its vocabulary is not the target's.
        """
        try:
            config = Config.from_file(path)
        except Exception as error:  # LitGPT does not check what it reads
            reason = " ".join(str(error).split())
            raise InputError(
                f"draft_config {path!r} is not a model_config.yaml as LitGPT writes it: {reason}."
            ) from error
        if config.padded_vocab_size != self.target.config.padded_vocab_size:
            raise InputError(
                f"draft_config {path!r} has padded_vocab_size {config.padded_vocab_size}, but the target has "
                f"{self.target.config.padded_vocab_size}; set its vocab_size and padded_vocab_size to the target's."
            )
        return config

    def _fabric(self) -> Fabric:
        load, precision = self.load, self.config.training_precision
        devices = load.devices if isinstance(load.devices, (int, str)) else list(load.devices)
        fabric = Fabric(accelerator=load.accelerator, devices=devices, precision="32-true")
        on_gpu = fabric.device.type == "cuda"
        if precision is None:
            precision = "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported() else "32-true"
        if precision != "32-true":
            fabric = Fabric(accelerator=load.accelerator, devices=devices, precision=precision)
        fabric.launch()
        return fabric

    # --- what is trained ---

    def _training(self, fabric: Fabric, train: list[Text], held_out: list[Text]) -> Training:
        config = self.config
        on_gpu = fabric.device.type == "cuda"
        precision = self.load.precision or ("bf16-true" if on_gpu and torch.cuda.is_bf16_supported() else "32-true")
        taps = spread_taps(self.target.config.n_layer) if config.kind == "dflash" else ()
        target = FrozenTarget(self.target, DTYPES[precision], fabric.device, taps)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            learner = self._learner(target)
        measured = held_out[: config.measured_texts]
        return Training(
            fabric,
            learner,
            StatesOf(target, train, keep=fabric.world_size == 1),
            StatesOf(target, measured, keep=fabric.is_global_zero),
            texts=len(train),
            measured=len(measured),
            files=self.files,
            config=config,
            sampling=self.sampling,
            seed=self.seed,
            console=self.console,
        )

    def _learner(self, target: FrozenTarget) -> Learner:
        config, temperature = self.config, self.settings.temperature
        if config.kind == "dflash":
            network = network_config(
                self.target.config,
                layers=config.draft_layers,
                block_size=config.block_size,
                mask_token_id=self._mask_token(),
            )
            return BlockDrafter(network, target, loss=config.loss, temperature=temperature, anchors=config.anchors)
        weights: Any
        vocab_size, tokenizer_dir, dtype = None, self.target.dir, None
        if self.start is not None:
            model, weights = self.start.config, read_state_dict(self.start)
            vocab_size, tokenizer_dir = shared_vocabulary(self.target, self.start), self.start.dir
        elif config.from_layers is not None:
            model, weights = first_layers(self.target, config.from_layers)
        else:
            assert config.draft_config is not None
            model, weights, dtype = self._new_config(config.draft_config), None, torch.bfloat16
        return DraftModel(
            model,
            weights,
            target,
            tokenizer_dir=tokenizer_dir,
            dtype=dtype or weights["lm_head.weight"].dtype,
            k=self.k,
            loss=config.loss,
            temperature=temperature,
            lora_r=config.lora_r,
            vocab_size=vocab_size,
        )

    def _mask_token(self) -> int:
        """A stop token: no context contains it, and unlike padding ids it has a trained embedding."""
        single = [sequence[0] for sequence in self.codec.stop_tokens if len(sequence) == 1]
        return single[0] if single else self.target.config.vocab_size - 1

    def _bytes_needed(self, training: Training, prompts: list[dict[str, Any]]) -> int:
        """Upper estimate of disk use: state and draft, each with its temporary copy, and the texts."""
        texts = len(prompts) * self.settings.max_new_tokens * TEXT_BYTES
        return 2 * training.state_bytes + 2 * training.learner.folder_bytes + texts

    # --- the end ---

    def _finish(self, training: Training, train: list[Text], held_out: list[Text]) -> dict[str, Any]:
        measured = held_out[: self.config.measured_texts]
        served = {"best": self._serve("served", measured, draft_dir=self.files.out, drafter="auto")}
        if self.start is not None:
            served["start"] = self._serve("served-start", measured, draft_dir=self.start.dir, drafter="draft_model")
        best = training.best
        summary = {
            "out_dir": str(self.files.out),
            "ended": training.ended,
            "steps": training.step,
            "seconds": round(training.seconds, 1),
            "speculative_k": self.k,
            "temperature": self.settings.temperature,
            "top_k": self.settings.top_k,
            "top_p": self.settings.top_p,
            "texts": len(train),
            "answer_tokens": sum(len(text.ids) - text.start for text in train),
            "held_out_texts": len(held_out),
            "measured_texts": len(measured),
            "parameters": sum(p.numel() for p in training.learner.parameters()),
            "learning_rate": training.highest,
            "start": training.history[0],
            "best": best,
            "served": served,
            "history": training.history,
        }
        if self.first:
            if has_matplotlib():
                draw(summary, self.files.picture)
            else:
                self._say("No distill.png: that needs matplotlib (`pip install litspec[distill]`).")
            write_atomically(self.files.summary, (json.dumps(summary, indent=2) + "\n").encode())
            self.files.state.unlink(missing_ok=True)
        gains = (training.history[0]["tokens_per_round"], best["tokens_per_round"], served["best"]["tokens_per_round"])
        self._say(
            "Done ({}): {:.3f} tokens per round at the start, {:.3f} now, {:.3f} served.".format(training.ended, *gains)
        )
        self._say(f"Use it: litspec generate --checkpoint_dir {self.target.dir} --draft_dir {self.files.out}")
        return summary

    def _serve(self, name: str, texts: list[Text], **load: Any) -> dict[str, Any]:
        """Measures generation of held-out prompts with a draft: tokens per round, tokens per second, acceptance."""
        prompts = write_lines(self.files.folder / f"{name}-prompts.jsonl", [text.asked for text in texts])
        out = self.files.folder / f"{name}.jsonl"
        run_job(prompts, out, load=self._job_load(**load), speculative_k=self.k, **self._job_settings())
        all_done()
        stats = [load_line(line) for line in whole_lines(out.with_name(f"{out.name}.stats.jsonl"))]
        done = [line for line in stats if "rounds" in line]
        rounds, seconds = sum(line["rounds"] for line in done), sum(line["decode_seconds"] for line in done)
        tokens = sum(line["new_tokens"] - 1 for line in done)
        accepted = [sum(column) for column in _columns([line["accepted_by_position"] for line in done])]
        proposed = [sum(column) for column in _columns([line["proposed_by_position"] for line in done])]
        return {
            "tokens_per_round": round(tokens / rounds, 4) if rounds else 0.0,
            "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
            "acceptance_by_position": [round(a / p, 4) if p else 0.0 for a, p in zip(accepted, proposed)],
        }

    def _say(self, line: str) -> None:
        if self.first:
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)


def _columns(rows: list[list[int]]) -> list[list[int]]:
    """Columns of rows of unequal length."""
    width = max((len(row) for row in rows), default=0)
    return [[row[j] for row in rows if j < len(row)] for j in range(width)]
