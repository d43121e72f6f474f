"""`litspec generate`"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from litspec.types import DrafterName, DraftPlacementName, PlacementName, Precision, Quantize, SamplerName

DEFAULT_PROMPT = "What food do llamas eat?"


def generate(
    checkpoint_dir: str | None = None,
    draft_dir: str | None = None,
    prompt: str = DEFAULT_PROMPT,
    *,
    prompts_file: str | None = None,
    out_file: str | None = None,
    sys_prompt: str | None = None,
    num_samples: int = 1,
    max_new_tokens: int = 50,
    min_new_tokens: int = 0,
    speculative_k: int | Literal["auto"] = "auto",
    top_k: int | None = 50,
    top_p: float = 1.0,
    temperature: float = 0.8,
    sampler: SamplerName = "rejection",
    seed: int = 1234,
    stop: list[str] | None = None,
    drafter: DrafterName = "auto",
    exit_layer: int | None = None,
    verify_width: int = 8,
    accelerator: str = "auto",
    devices: int | str = 1,
    num_nodes: int = 1,
    placement: PlacementName = "auto",
    precision: Precision | None = None,
    draft_precision: Precision | None = None,
    draft_device: str | None = None,
    draft_placement: DraftPlacementName = "replicated",
    quantize: Quantize | None = None,
    compile: bool = False,
    include_prompt: bool = False,
    output_format: Literal["text", "json"] = "text",
    show_acceptance: bool = False,
) -> int:
    """Generate text with speculative decoding; it is the text of the target alone, sooner.

    The text goes to stdout as it is committed, everything else to stderr.

    Args:
        checkpoint_dir: Folder of the target in LitGPT's format, or its name below checkpoints/. Without it the embedded
            demonstration pair runs.
        draft_dir: Folder of the draft model, whose tokenizer must be the target's.
        prompt: What to continue or answer; the checkpoint's prompt style is applied to it.
        prompts_file: Many prompts. A .txt file holds one a line; a .jsonl file holds an object a line with
            "prompt", perhaps "id", and perhaps sys_prompt, max_new_tokens, min_new_tokens, temperature, top_k, top_p,
            seed or stop for this prompt alone. Exits with 1 where a prompt got an error instead of a text, with 143
            after SIGTERM.
        out_file: Where the texts for prompts_file go, a JSON object a line in the order of the prompts; what they cost
            goes to OUT_FILE.stats.jsonl. The same command resumes what was interrupted.
        sys_prompt: System prompt, for prompt styles that have one.
        num_samples: How many texts to generate for each prompt.
        max_new_tokens: Most tokens of each text.
        min_new_tokens: No text stops before it has this many tokens.
        speculative_k: Tokens that the drafter proposes a round, at most verify_width - 1; auto chooses what pays.
        top_k: Only the k most likely tokens; null for all.
        top_p: Only the most likely tokens that hold this probability together, in [0, 1]; 0 is greedy, 1 takes all.
        temperature: Divides the logits; 0 is greedy.
        sampler: rejection accepts most proposals; coupled makes a sampled text the same for every drafter and every k.
        seed: Of the random numbers; the same seed gives the same text.
        stop: A string before which the text ends; repeat the flag for several.
        drafter: Who proposes: a draft model, the prompt itself (suffix: earlier texts too), the target's own first
            layers, or nobody; auto is the draft model where draft_dir is given, else prompt_lookup.
        exit_layer: Layers that draft, for early_exit; a quarter of them by default.
        verify_width: Rows the target verifies at once, always; the last bits of the text depend on it.
        accelerator: As in Lightning Fabric: auto, cpu, cuda, mps.
        devices: How many devices, or auto for all.
        num_nodes: How many machines.
        placement: Where the weights live; auto is single where the pair fits one device, else tensor_parallel.
        precision: Of the target's weights; by default bf16-true on a GPU that has it, 32-true on a CPU.
        draft_precision: Of the draft model's weights; by default the target's.
        draft_device: Device of the draft model, such as cuda:1; by default the target's.
        draft_placement: With tensor_parallel, whether every device holds the draft model whole or it is cut like the
            target.
        quantize: Quantize the target's linear layers with bitsandbytes (CUDA only).
        compile: Run steps as compiled graphs (torch.compile): seconds to minutes before the first token, then more
            tokens a second. Where two tokens are nearly equal the text may be another than without.
        include_prompt: Print the prompt before the text.
        output_format: text streams the text; json prints one object for each text.
        show_acceptance: Colour the text by where each token came from: drafted and accepted, or the target's own. Only
            in a terminal, and not where NO_COLOR is set.
    """
    from litspec.errors import InputError
    from litspec.llm import SpecLLM
    from litspec.report import TerminalTint

    if num_samples < 1:
        raise InputError(f"num_samples must be at least 1, got {num_samples}")
    load = dict(
        checkpoint_dir=checkpoint_dir,
        draft_dir=draft_dir,
        drafter=drafter,
        exit_layer=exit_layer,
        verify_width=verify_width,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        placement=placement,
        precision=precision,
        draft_precision=draft_precision,
        draft_device=draft_device,
        draft_placement=draft_placement,
        quantize=quantize,
        compile=compile,
    )
    settings = dict(
        sys_prompt=sys_prompt,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        speculative_k=speculative_k,
        top_k=top_k,
        top_p=top_p,
        temperature=temperature,
        sampler=sampler,
        seed=seed,
        stop=stop,
    )
    if prompts_file is not None or out_file is not None:
        if prompts_file is None or out_file is None:
            missing = "prompts_file" if prompts_file is None else "out_file"
            raise InputError(f"prompts_file and out_file go together, but {missing} is not given.")
        for name, given, default in (
            ("prompt", prompt, DEFAULT_PROMPT),
            ("include_prompt", include_prompt, False),
            ("output_format", output_format, "text"),
            ("show_acceptance", show_acceptance, False),
        ):
            if given != default:
                raise InputError(
                    f"{name} = {given!r} does not go with prompts_file, whose texts go to out_file; leave it out."
                )
        from litspec.jobs import run_job

        return run_job(prompts_file, out_file, load=load, num_samples=num_samples, **settings)
    llm = SpecLLM.load(**load)
    if not llm.placed.is_rank_zero:
        # The other ranks compute along; the first one speaks.
        for index in range(num_samples):
            llm.generate(prompt, index=index, **settings)
        return 0
    log(llm.describe())
    if compile:
        announce_graphs(llm.placed.graphs)
    tint = TerminalTint(sys.stdout) if show_acceptance and output_format == "text" else None
    if tint is not None and tint.enabled:
        tint.write_legend(sys.stderr)
    for index in range(num_samples):
        _sample(llm, prompt, include_prompt, output_format, tint, index=index, **settings)
    return 0


def log(text: str) -> None:
    """Says something to the person at the terminal, out of the way of the text."""
    print(text, file=sys.stderr, flush=True)


def announce_graphs(graphs: Any) -> None:
    """Has a line printed when the first of some graphs is built, since what follows takes a while."""

    def say() -> None:
        graphs.notify = lambda: None
        log("Compiling; this takes a while ...")

    graphs.notify = say


def _sample(llm: Any, prompt: str, include_prompt: bool, output_format: str, tint: Any, **settings: Any) -> None:
    """Prints one text and what it cost."""
    compiled = llm.compile_seconds
    stream = llm.generate(prompt, stream=True, **settings)
    as_text = output_format == "text"
    if as_text and include_prompt:
        sys.stdout.write(prompt)
    try:
        for piece in stream:
            if tint is not None:
                tint.write(stream.latest)
            elif as_text:
                sys.stdout.write(piece)
                sys.stdout.flush()
    finally:
        if as_text:
            sys.stdout.write("\n")
    completion = stream.completion
    if not as_text:
        text = prompt + completion.text if include_prompt else completion.text
        record = {
            "prompt": completion.prompt,
            "text": text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stats": completion.stats.as_dict(),
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)
    log(completion.stats.summary())
    if compiled := llm.compile_seconds - compiled:
        log(f"Before the first token {compiled:.0f} s went into compiling.")
