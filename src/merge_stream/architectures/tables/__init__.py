"""Families whose repository has other names than a trainer holds in memory: one file for a group, tables only."""
