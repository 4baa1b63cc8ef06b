"""Which experts of later layers to ask for, and whether asking pays."""
