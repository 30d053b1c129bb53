"""CuTe DSL kernels. The modules import the package `cutlass` (nvidia-cutlass-dsl)."""

LANGUAGE = "cute"
