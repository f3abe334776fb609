# SPDX-License-Identifier: Apache-2.0
"""Options that commands of several packages share: sources of KV and cache events."""
