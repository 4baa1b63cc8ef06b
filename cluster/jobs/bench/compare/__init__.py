"""`tiermoe bench compare`: presets side by side on the same prompts."""
