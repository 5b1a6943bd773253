"""Bulk work over documents in files and buckets."""
