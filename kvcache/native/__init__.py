# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries, ahead of time or at first use, and loads them."""
