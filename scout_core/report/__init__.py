"""Where incidents and events go: JSON lines, console, metrics, pages."""
