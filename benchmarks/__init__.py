"""Benchmarks: planning time and step time, measured with their conditions. See README.md."""
