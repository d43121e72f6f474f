"""The GPT that verifies: LitGPT's weights and config, a forward made for blocks."""

from litspec.model.gpt import GPT
from litspec.model.kv_cache import KVCache, kv_bucket

__all__ = ["GPT", "KVCache", "kv_bucket"]
