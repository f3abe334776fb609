"""`make gpu`: builds, checks and measures on a machine with an NVIDIA GPU, in under ten minutes.

`python3 -m benchmarks.gpu --help`. The program uses that machine's own python3 and packages, installs
nothing and needs no network. docs/measuring.md says what each stage answers.
"""
