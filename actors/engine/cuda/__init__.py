"""What touches CUDA."""
