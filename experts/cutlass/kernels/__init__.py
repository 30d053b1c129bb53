"""Kernels in CuTe DSL. Importing one imports the package `cutlass` (nvidia-cutlass-dsl)."""

LANGUAGE = "cute"
