"""Faults on purpose: injection as data, drills, campaigns, simulations."""
