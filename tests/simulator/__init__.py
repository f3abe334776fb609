# SPDX-License-Identifier: Apache-2.0
"""One simulator for the whole system: engines, a store, and the transfers, offers and cache events
between the engines, in one process, one thread, with one clock and one seed.

Operations are drawn from every public call with every option, by walking over signatures (`walk`).
Each page holds real bytes, and each byte that attention reads, a hit finds or a transfer delivers is
compared with what it must be (`content`). See `python -m tests.simulator --help`.
"""
