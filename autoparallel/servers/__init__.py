"""Parameter servers: embedding tables and dense parameters on processes of their own, pulled and pushed by workers."""
