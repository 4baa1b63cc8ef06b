"""`tiermoe bench NAME`: measurements that say where they come from and can fail."""
