"""Exchange by hosts: over torch.distributed between them, through shared memory inside each."""
