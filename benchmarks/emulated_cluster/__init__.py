"""A cluster emulated on one Linux machine: step times of plans, measured and compared with the predictions."""
