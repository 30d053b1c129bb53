"""CuTe DSL kernels; importing one imports the package `cutlass` (nvidia-cutlass-dsl)."""

LANGUAGE = "cute"
