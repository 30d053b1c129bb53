"""The device on which tests run: the GPU of this machine if it has one, otherwise its CPU."""

import torch

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
