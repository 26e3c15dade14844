"""Measurements, each a script of its own: python benchmarks/FOLDER/NAME.py [--quick] [--json FILE].

paper     the paper's tables from recipes, its figures' measurements, its samplers
zoo       four small image-text models, the scripts that make them and their tasks, and their table
encoders  real encoders of texts and images, by probes
language  real language models, by generated answers
speed     seconds and bytes against the bare engine; a row from a GPU
scale     models larger than memory, thousands of adapters
faults    kills, full disks, hostile files
shared    what several of them use, and the maker of the pages' tables
results   what was measured
"""
