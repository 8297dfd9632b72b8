"""``autoparallel selftest``: whether programs are right and fast on the machines at hand. See README.md."""
