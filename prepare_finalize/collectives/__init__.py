"""Exchange by torch.distributed collectives, over NCCL or gloo."""
