"""Exchange by kernels that write into the other ranks' memory over NVLink."""
