"""Recording of routing traces."""
