"""Products over rows in the order of experts, on any GPU: what GroupedGemmExperts launches."""
