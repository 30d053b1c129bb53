"""Parts over collectives of torch.distributed, with NCCL or gloo."""
