"""SCOUT adapter for torchtitan."""
