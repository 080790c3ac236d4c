"""SCOUT adapter for deepspeed."""
