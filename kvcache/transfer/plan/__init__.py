# SPDX-License-Identifier: Apache-2.0
"""Transfer plans, which define the bytes that a local rank reads from each remote rank."""
