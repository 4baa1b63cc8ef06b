"""Messages and channels between processes: `messages.py`, `channel.py`; docs/architecture.md tells how they work."""
