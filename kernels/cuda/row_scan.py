"""
Passes over one row of logits, and searches in it, shared by sampling and log-probabilities.

A row is read in tiles of BLOCK logits; a lane is a place in the tile, so that each lane sees
every BLOCK-th token and nothing moves between threads until the pass is over.

Searches run on an integer that orders as the logit does. A 16-bit logit has 16 bits of it, so a
bisection ends at one exact value after 16 halvings, and for float32 after 32.
"""

import math

import torch
import triton
import triton.language as tl

# low bits of a float32 that a logit of this dtype never sets
KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

NO_ID = tl.constexpr((1 << 31) - 1)
INF = tl.constexpr(math.inf)


@triton.jit
def row_tile(row_ptr, start, vocab, BLOCK: tl.constexpr):
    """[BLOCK] int32 ids and float32 logits; -inf past the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + ids, mask=ids < vocab, other=-INF)
    return ids, logits.to(tl.float32)


@triton.jit
def lane_peaks(row_ptr, begin, end, vocab, BLOCK: tl.constexpr, STAGES: tl.constexpr = 1):
    """Each lane's largest logit and its lowest id; +inf in a lane that met a NaN or +inf."""
    best = tl.full([BLOCK], -INF, tl.float32)
    best_ids = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        ids, x = row_tile(row_ptr, start, vocab, BLOCK)
        x = tl.where(x < INF, x, INF)
        better = x > best
        best = tl.where(better, x, best)
        best_ids = tl.where(better, ids, best_ids)
    return best, best_ids


@triton.jit
def first_of_largest(values, ids):
    """The largest value, and the lowest id that has it."""
    largest = tl.max(values, axis=0)
    return largest, tl.min(tl.where(values == largest, ids, NO_ID), axis=0)


@triton.jit
def is_finite(x):
    return (x > -INF) & (x < INF)


@triton.jit
def order_key(x, SHIFT: tl.constexpr):
    """int32 that orders as float32 does; -0.0 comes just before 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def key_value(key, SHIFT: tl.constexpr):
    """The float32 whose `order_key` this is."""
    bits = (key << SHIFT) | ((key >> 31) & ((1 << SHIFT) - 1))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest_reaching(keys, weights, target, lowest, peak_key):
    """
    The largest key such that what is no smaller weighs at least the target.

    keys [n] int32, weights [n] int32 or int64. `lowest` is taken to reach it unseen.
    """
    # int64: float32 keys span all of int32
    low = lowest.to(tl.int64)
    high = peak_key.to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        weight = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0), axis=0)
        low = tl.where(weight >= target, middle, low)
        high = tl.where(weight >= target, high, middle)
    return low.to(tl.int32)


@triton.jit
def cutoff_of_lanes(best, num_wanted, peak_key, SHIFT: tl.constexpr):
    """
    The logit that `num_wanted` lanes reach, so at least as many tokens do.

    The largest tokens are mostly in lanes of their own, so hardly more than wanted reach it. At
    most BLOCK may be wanted; -inf where fewer lanes have a finite logit.
    """
    keys = order_key(best, SHIFT)
    ones = tl.full(best.shape, 1, tl.int32)
    return key_value(largest_reaching(keys, ones, num_wanted, tl.min(keys, axis=0), peak_key), SHIFT)


@triton.jit
def list_candidates(hits, ids, list_ptr, count_ptr, CAPACITY: tl.constexpr):
    """Append the ids that are hit to a list; past its capacity they are counted alone."""
    places = tl.atomic_add(count_ptr + tl.zeros_like(ids), 1, mask=hits, sem="relaxed")
    tl.store(list_ptr + places, ids, mask=hits & (places < CAPACITY))


@triton.jit
def begin_list(count_ptr):
    tl.store(count_ptr, 0)
    tl.debug_barrier()


@triton.jit
def end_list(count_ptr):
    """How many were hit; after this the list may be read by any thread of the program."""
    tl.debug_barrier()
    # counts were made in the second-level cache: the first may hold another program's older line
    return tl.load(count_ptr, cache_modifier=".cg")


@triton.jit
def read_list(row_ptr, list_ptr, num_listed, CAPACITY: tl.constexpr):
    """[CAPACITY] ids and their logits; NO_ID and -inf past the end."""
    places = tl.arange(0, CAPACITY)
    there = places < num_listed
    ids = tl.load(list_ptr + places, mask=there, other=NO_ID, cache_modifier=".cg")
    return ids, tl.load(row_ptr + ids, mask=there, other=-INF).to(tl.float32)
