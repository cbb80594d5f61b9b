"""Preference tuning (TL;DR): summaries of posts, rewarded by a reward model, judged by gold scores that are not trained on."""
