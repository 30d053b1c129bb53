"""`mk profile`: traces of a call, and stage times compared with their roofline.

`inputs` draws the arguments. `record` times and traces calls on each rank. `chrome` reads and
merges the traces, and `events` computes stage times from them. `report` adds rooflines. `summary`,
`timeline` and `html` present the result. `modular_kernel.replay.stages` defines the stages.
"""
