"""hetero runs and trains PyTorch models that do not fit: weights stream across GPU, CPU and disk, exactly."""
