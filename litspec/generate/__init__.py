"""Drop-in replacements for modules of `litgpt.generate`."""
