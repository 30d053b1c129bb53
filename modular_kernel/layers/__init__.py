"""What stands above a kernel: routing, the loading of weights, and layers made of both."""
