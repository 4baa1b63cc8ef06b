"""Experts cut in two: how expert memory is divided between their tops, by layer, and their bottoms (MoEpic)."""
