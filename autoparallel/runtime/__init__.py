"""Run time: the parallel module, process groups, random numbers, state. See README.md."""
