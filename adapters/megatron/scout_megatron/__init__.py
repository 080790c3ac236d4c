"""SCOUT adapter for megatron."""
