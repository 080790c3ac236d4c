"""Pure rules: values in, values out. No torch, no clock, no file, no log."""
