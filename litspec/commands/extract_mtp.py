"""`litspec extract_mtp`"""

from __future__ import annotations

import sys

from litspec.arguments import spelled_out


@spelled_out(flags=True)
def extract_mtp(checkpoint_dir: str, out_dir: str) -> int:
    """Write the MTP layers of a target's Hugging Face checkpoint to a separate folder, for --draft_dir.

    Args:
        checkpoint_dir: Folder of the target in Hugging Face's format: config.json and safetensors.
        out_dir: Folder to write; it must not hold weights.
    """
    from litspec.drafters.mtp import extract_mtp_layers

    count = extract_mtp_layers(checkpoint_dir, out_dir)
    print(f"Wrote {count} tensors to {out_dir}.", file=sys.stderr)
    return 0
