"""Compile every CuTe DSL kernel ahead of time, and print the path of each object file."""

import sys

from experts.cutlass import fp4_product, product


def main() -> None:
    for kernel in (*product.KERNELS.values(), fp4_product.KERNEL):
        sys.stdout.write(f"{kernel.name} for {kernel.arch}: {kernel.compile_to_cache()}\n")


if __name__ == "__main__":
    main()
