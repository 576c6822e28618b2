"""What is known before a search begins: earlier campaigns, imported files, shipped schedules, the calibrated model."""
