"""`litspec distill`"""

from __future__ import annotations

import json
from typing import Literal

from litspec.arguments import spelled_out
from litspec.config import GenerateConfig, LoadConfig
from litspec.training.config import DEFAULTS, NOT_OFFERED, DistillConfig


@spelled_out(
    flags=True, without=NOT_OFFERED, defaults=DEFAULTS, load=LoadConfig, config=DistillConfig, settings=GenerateConfig
)
def distill(
    data: str,
    out_dir: str,
    load: LoadConfig,
    *,
    config: DistillConfig,
    settings: GenerateConfig,
    output_format: Literal["text", "json"] = "text",
) -> int:
    """Train a draft model for your own target: the target answers prompts, and the draft model learns its
    distributions.

    The result is a folder for --draft_dir. The same command resumes an interrupted run. Progress goes to stderr.

    Args:
        data: Prompts similar to those of later use: a file, or a folder of files. A .jsonl file holds one object per
            line, with "prompt" and optionally an answer, "text". A .txt file holds one prompt per line. Other text is
            split into prompts.
        out_dir: The folder for the draft model. It must not exist, or be that of an earlier run of the same command.
        {load}
        {config}
        {settings}
        output_format: json prints the summary as one object; it is also in distill.json in out_dir.
    """
    from litspec.training.distillation import Distillation

    summary = Distillation(data, out_dir, load, config, settings).run()
    if output_format == "json":
        print(json.dumps(summary))
    return 0
