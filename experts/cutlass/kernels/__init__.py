"""CuTe DSL kernels. Importing one imports the package `cutlass` (nvidia-cutlass-dsl)."""

LANGUAGE = "cute"
