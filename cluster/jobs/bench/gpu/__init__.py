"""`tiermoe bench gpu`: every check and measurement that needs a GPU, on a bare machine, within minutes.

    run.sh -> packages, build (C++ in place) -> job: one child process per part, most important first, each with a time
    limit -> gpu.json and gpu.md, written anew after every part

A part is a process of its own: a crash or a hang of one, which on a GPU takes the whole context along, leaves the
others alone, and what a part has measured until then is kept. Nothing here needs Ray, a network or files but the
repository's own.
"""
