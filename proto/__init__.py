"""Messages and channels between processes.

Empty so far: lead and store share mapped files, and the driver talks to the lead through Ray. The channel (shared
memory and gRPC) comes with the near-data worker.
"""
