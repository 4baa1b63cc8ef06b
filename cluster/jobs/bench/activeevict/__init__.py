"""`tiermoe bench activeevict`: pre-eviction against prefetching baselines (ActiveEvict)."""
