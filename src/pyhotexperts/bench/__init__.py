"""The benchmark that compares offload modes at equal VRAM: ``pyhotexperts bench``.

`config` is what to measure, `child` measures one configuration in a process of its own, `runner` decides what to run
and runs it, `summary` makes rows of medians and ratios, `bound` says what the machine allows, `output` writes them.
"""
