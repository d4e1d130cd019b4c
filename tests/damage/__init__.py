"""Damaged checkpoints: whoever reads one finds it, or says that nobody looked. There is no third outcome.

    python -m tests.damage                           the whole matrix, and a table of its outcomes
    python -m tests.damage --random 10000 --seed 7   as many random damages, seeds 7, 8, ...
    python -m tests.damage --random 1 --seed 7193    one of them again

`damages` has what can happen to the bytes, `formats` the checkpoints that it happens to, `readers` the ways to read
them, `matrix` puts these together and judges; `ranks` is the share that several processes read together.
"""
