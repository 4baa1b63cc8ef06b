"""What runs on which node: decided by pure functions from the configuration, the model's sizes and the nodes.

    inputs    sizes of the model; nodes from a file, this machine or a running Ray
    spec      what is wanted and what there is, in numbers, and the topology that comes of it
    planner   spec + sizes + nodes -> topology
    estimate  topology -> what copies take at least; `make_plan` does all of it

`spec`, `planner` and `estimate` are pure; `inputs` reads.
"""
