"""How and where a trial runs: from a config to its outcome, in this process, in others, or on a cluster."""
