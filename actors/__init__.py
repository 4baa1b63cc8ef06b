"""The processes (plain classes; `cluster.deploy` makes actors of them), and what they decide."""
