"""Runs `mk check` from a checkout without installation.

python tools/check_combinations.py --pf-type MoEPrepareAndFinalizeNoEP --experts-type TritonExperts
"""

from in_checkout import run_verb

if __name__ == "__main__":
    run_verb("check")
