"""What a model is asked for: a loss whose gradient is taken, answers, and what the tuned source says."""
