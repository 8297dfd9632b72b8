"""Optimizer states on the host or on disk."""
