"""`tiermoe bench fmoe`: fMoE's evaluation on a model of ours, as a page."""
