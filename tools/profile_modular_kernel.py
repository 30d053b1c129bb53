"""Where does a pairing spend its time? `mk profile`, straight from a checkout.

python tools/profile_modular_kernel.py --pf-type BatchedPrepareAndFinalize ...
"""

from in_checkout import run_verb

if __name__ == "__main__":
    run_verb("profile")
