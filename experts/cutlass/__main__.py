"""Compile every CuTe DSL kernel ahead of time, and print the path of each object file."""

import sys

from experts.cutlass import block_gemm, fp4_gemm


def main() -> None:
    for kernel in (*block_gemm.KERNELS.values(), fp4_gemm.KERNEL):
        sys.stdout.write(f"{kernel.name} for {kernel.arch}: {kernel.compile_to_cache()}\n")


if __name__ == "__main__":
    main()
