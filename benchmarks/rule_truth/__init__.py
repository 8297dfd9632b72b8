"""Which ways of cutting an op are right, tried on shards: the rules' claims, DTensor's, and what would be possible."""
