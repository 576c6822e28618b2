"""What a schedule is compared with: one decode step in plain torch, on one GPU and on several."""
