"""What to try next: the Optuna study of a campaign, and the samplers that it asks."""
