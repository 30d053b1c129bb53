"""Exchange component whose kernels access the memory of other ranks over NVLink."""
