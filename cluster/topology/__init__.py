"""What runs on which node: decided by pure functions from the configuration, the model's sizes and the nodes.

    settings  what a cluster file says            nodes     the nodes, from a file, this machine or a running Ray
    facts     sizes of the model                  spec      all of that, resolved to numbers
    planner   spec + facts + nodes -> Topology    estimate  Topology -> predicted tokens per second

`spec`, `ledger`, `planner`, `plan` and `estimate` are pure; `nodes` and `facts` read.
"""
