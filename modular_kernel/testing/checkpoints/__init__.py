"""Write tiny checkpoints of published model families and formats, with exact float64 values."""
