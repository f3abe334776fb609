# SPDX-License-Identifier: Apache-2.0
"""Transfer plans, which define what bytes a local rank reads from each remote rank."""
