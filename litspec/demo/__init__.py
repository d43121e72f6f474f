"""The embedded pair: a small target and its draft in LitGPT's checkpoint format, made by `scripts/train_demo_pair.py`.

They write in the manner of the novels they were trained on, and exist to show speculative decoding on any CPU without
a download.
"""

from pathlib import Path

DEMO_TARGET: Path = Path(__file__).parent / "target"
DEMO_DRAFT: Path = Path(__file__).parent / "draft"
