"""What Python programs call: `flywheel.search`, `flywheel.evaluate`, `flywheel.to_dataframe`, and their results."""
