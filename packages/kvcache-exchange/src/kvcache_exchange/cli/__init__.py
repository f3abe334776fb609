# SPDX-License-Identifier: Apache-2.0
"""What commands of several packages share: options for sources of KV, cache events and eviction
policies, checks of values and requirements, and progress bars.
"""
