"""Everything that a run writes for its reader: metrics, samples, the display, warnings and the run folder."""
