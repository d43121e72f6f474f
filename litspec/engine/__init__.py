"""Many texts at once over one target: see `litspec.reference` for the algorithm, `engine.engine` for the loop."""
