"""Run time: the parallel module, its calls, state and data. See README.md."""
