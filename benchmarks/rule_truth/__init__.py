"""Which ways of cutting an op are right, tried on pieces: the rules' claims, DTensor's, and what would be possible."""
