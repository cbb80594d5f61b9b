"""How roles reach each other. The loops know only the interfaces in `channels`."""
