"""Dispatch and combine by kernels that access other ranks' memory over NVLink."""
