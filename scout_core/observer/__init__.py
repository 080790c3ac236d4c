"""Torch-free agent processes that outlive a frozen trainer long enough to name the culprit."""
