"""Processes and the messages between them. The loops know only the interfaces in `channels`."""
