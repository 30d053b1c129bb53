"""Where tests compute: DEVICE is this machine's GPU if it has one, else its CPU."""

import torch

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
