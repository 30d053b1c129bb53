"""Runs `mk profile` from a checkout without installation.

python tools/profile_modular_kernel.py --pf-type BatchedPrepareAndFinalize ...
"""

from in_checkout import run_verb

if __name__ == "__main__":
    run_verb("profile")
