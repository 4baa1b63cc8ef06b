"""Messages and channels between processes: `messages.py`, `channel.py`; docs/channel.md tells how they work."""
