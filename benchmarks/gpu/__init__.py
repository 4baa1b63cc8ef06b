"""`tiermoe bench gpu`: every check and measurement that needs a GPU, on a bare machine, within minutes.

    run.sh -> packages, build (C++ in place) -> run_parts: one child process per part, most important first, each with a
    time limit -> gpu.json and gpu.md, written anew after every part

A crash or a hang of a part, which takes the GPU context along, costs neither the other parts nor its own rows so far.
Nothing needs Ray, a network or files beyond the repository.
"""
