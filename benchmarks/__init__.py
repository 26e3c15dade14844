"""Measurements, each a script of its own: python benchmarks/FOLDER/NAME.py [--quick] [--json FILE].

quality   how much of a fine-tune arrives, and what it depends on
speed     seconds and bytes against the bare engine, and how they grow
scale     models larger than memory, several processes, thousands of adapters
faults    kills, full disks, hostile files
zoo       four small models, the scripts that make them and their tasks, and the paper's tables on them
shared    what several of them use, and the maker of the pages
results   what was measured
"""
