"""A real GPU: streams, events and pinned host memory. Only here and in the Triton kernels is `torch.cuda` called."""
