"""Exact Top-K: the K highest-scoring keys of each query head, found by scoring all of them."""
