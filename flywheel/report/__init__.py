"""Reports of a campaign: one HTML page and its pictures."""
