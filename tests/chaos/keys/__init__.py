"""Ordered work under kills: keys whose jobs must run one at a time, in order, each effect once."""
