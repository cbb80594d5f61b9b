"""Preference tuning (TL;DR): summaries of posts, rewarded by a reward model and judged by gold scores."""
