"""`tiermoe bench moepic`: MoEpic's evaluation on a model of ours, as a page."""
