"""PrepareAndFinalize components ('parts') over collectives of torch.distributed (NCCL or gloo)."""
