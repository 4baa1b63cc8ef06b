"""`tiermoe bench buddymoe`: BuddyMoE's tables 2 to 4 on a model of ours, as a page."""
