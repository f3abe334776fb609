# SPDX-License-Identifier: Apache-2.0
"""The commands `kvcache demo` and `kvcache serve`."""
