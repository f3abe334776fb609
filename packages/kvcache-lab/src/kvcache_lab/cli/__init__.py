# SPDX-License-Identifier: Apache-2.0
"""The commands `kvcache replay`, `kvcache plan` and `kvcache bench`."""
