"""Runs many texts at once on one target: see `litspec.reference` for the algorithm, `engine.engine` for the loop."""
