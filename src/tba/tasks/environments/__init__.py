"""Environments: worlds that answer the policy's turns, with tools or without, and the tokens of such conversations."""
