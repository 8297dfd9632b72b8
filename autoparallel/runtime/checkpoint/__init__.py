"""Checkpoints: weights in safetensors as other libraries read them, and the whole state of a run."""
