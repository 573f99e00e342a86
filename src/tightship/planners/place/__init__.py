"""Planners that decide where every byte lies: Problem -> Solution.

Each file is one way to give offsets to buffers with known live ranges; ``portfolio`` combines them and is
the default. All minimize the arena, honor alignments and pinned offsets, and report the same lower bound.
"""
