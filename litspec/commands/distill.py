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
    """Train a draft for your own target: the target answers prompts, and the draft learns its distributions.

    It ends in a folder for --draft_dir. The same command goes on with what was interrupted, whatever interrupted it.
    Progress goes to stderr.

    Args:
        data: Prompts of the future use: a .jsonl file with an object a line, "prompt" and perhaps an answer, "text"; a
            .txt file with a prompt a line; other text, which is cut into prompts; or a folder of such files.
        out_dir: The folder for the draft. It must not exist, or be what an earlier run of the same command left.
        {load}
        {config}
        {settings}
        output_format: json prints the summary, which distill.json in out_dir holds too, as one object.
    """
    from litspec.training.distillation import Distillation

    summary = Distillation(data, out_dir, load, config, settings).run()
    if output_format == "json":
        print(json.dumps(summary))
    return 0
