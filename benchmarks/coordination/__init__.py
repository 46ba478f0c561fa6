"""Scenarios of several workers on one database, each a module to run, for either library through its adapter."""
