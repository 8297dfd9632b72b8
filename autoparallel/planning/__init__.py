"""Which plan: one mesh, baselines, the joint search, questions to a plan. See README.md."""
