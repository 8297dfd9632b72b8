"""When things run in a step: configuration, stages, async windows. See README.md."""
